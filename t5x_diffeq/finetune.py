"""Tunes a trained run's model on a grid of its own: --config=FILE --workdir=NEW.

FILE is configs/finetune.py:lora, :full or :hypernetwork, with --config.init_from=DIR, the run, and
--config.model.num_steps=9. Model and tokenizer come from DIR, the weights from that run on the grid
asked for. NEW is a run as any other, complete in itself; the same command again continues it.
"""

from absl import flags
from ml_collections.config_flags import config_flags

from t5x_diffeq import command_line
from t5x_diffeq.errors import InputError

FLAGS = flags.FlagValues()
CONFIG = config_flags.DEFINE_config_file(
    "config", None, "configs/finetune.py:lora, :full or :hypernetwork.", flag_values=FLAGS
)
WORKDIR = flags.DEFINE_string(
    "workdir", None, "Folder of the new run; made, or continued.", flag_values=FLAGS
)


def main() -> int:
    """The verb."""
    if CONFIG.value is None:
        raise InputError("finetune needs --config=configs/finetune.py:lora and --workdir=NEW")
    workdir = command_line.folder(WORKDIR, "finetune")

    from t5x_diffeq.verbs.finetune import finetune  # JAX and the rest take seconds
    from t5x_diffeq.verbs.train import sole_writer

    with sole_writer(workdir):
        return finetune(CONFIG.value, workdir)


if __name__ == "__main__":
    command_line.run(main, __doc__, FLAGS, several=True)
