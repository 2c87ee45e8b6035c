"""Makes evaluation tasks from a run's validation text: --workdir=DIR --output=FOLDER.

They need no download. own_ending asks which of four endings belongs to a passage, like HellaSwag;
last_word asks for the last word of a passage, like LAMBADA. Passages are as long as the model
allows and begin and end at a word. They depend on the text, the tokenizer and the length only.
"""

from absl import flags

from t5x_diffeq.runtime import command_line, run_flags

FLAGS = flags.FlagValues()
_WORKDIR = run_flags.define_workdir(FLAGS)
_OUTPUT = flags.DEFINE_string("output", None, "Folder for the task files.", flag_values=FLAGS)


def main() -> None:
    """Runs the verb."""
    workdir, output = (
        command_line.parse_folder(flag, "make_tasks") for flag in (_WORKDIR, _OUTPUT)
    )

    from t5x_diffeq.verbs.make_tasks import make_tasks  # importing JAX takes seconds

    make_tasks(workdir, output)


if __name__ == "__main__":
    command_line.run(main, __doc__, FLAGS)
