"""Fine-tunes the model of a run, also at another number of steps: --config=FILE --workdir=NEW.

FILE is configs/finetune.py:lora, :full or :hypernetwork. --config.init_from=DIR names the run
that provides the model, its weights and the tokenizer.
--config.model.num_steps=9 chooses the number of solver steps. NEW becomes a complete run; the same
command again resumes it.
"""

from absl import flags
from ml_collections.config_flags import config_flags

from t5x_diffeq.runtime import command_line
from t5x_diffeq.runtime.config import flatten
from t5x_diffeq.runtime.errors import InputError

FLAGS = flags.FlagValues()
CONFIG = config_flags.DEFINE_config_file(
    "config", None, "configs/finetune.py:lora, :full or :hypernetwork.", flag_values=FLAGS
)
_WORKDIR = flags.DEFINE_string(
    "workdir", None, "Folder of the new run, or of one to resume.", flag_values=FLAGS
)


def main() -> int:
    """Runs the verb."""
    if CONFIG.value is None:
        raise InputError("finetune needs --config=configs/finetune.py:lora and --workdir=NEW")
    workdir = command_line.parse_folder(_WORKDIR, "finetune")

    from t5x_diffeq.runs.workdir import sole_writer  # importing JAX takes seconds
    from t5x_diffeq.verbs.finetune import finetune

    with sole_writer(workdir):
        return finetune(flatten(CONFIG.value), workdir)


if __name__ == "__main__":
    command_line.run(main, __doc__, FLAGS, several=True)
