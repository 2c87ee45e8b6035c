"""Tasks of the validation text itself, where the hub's can't be had: --workdir=DIR --output=FOLDER.

own_ending: which of four endings a passage has, as HellaSwag asks. last_word: its last word, as
LAMBADA asks. Passages are as long as the model takes and begin and end with a word; they are a
function of the text, the tokenizer and the length alone.
"""

from absl import flags

from t5x_diffeq import command_line

FLAGS = flags.FlagValues()
WORKDIR = flags.DEFINE_string("workdir", None, "Folder of a run.", flag_values=FLAGS)
OUTPUT = flags.DEFINE_string("output", None, "Folder of the task files.", flag_values=FLAGS)


def main() -> None:
    """The verb."""
    workdir, output = (command_line.folder(flag, "make_tasks") for flag in (WORKDIR, OUTPUT))

    from t5x_diffeq.verbs.make_tasks import make_tasks  # JAX and the rest take seconds

    make_tasks(workdir, output)


if __name__ == "__main__":
    command_line.run(main, __doc__, FLAGS)
