"""Trains a model, or resumes a run: --config=configs/tiny.py --workdir=DIR.

--config.KEY=VALUE changes any key of the config. The same command again resumes the run at its last
checkpoint, or says that it is finished.
"""

import sys
from typing import Any

from absl import flags
from ml_collections.config_flags import config_flags

from t5x_diffeq.runtime import command_line
from t5x_diffeq.runtime.config import Config
from t5x_diffeq.runtime.errors import InputError

FLAGS = flags.FlagValues()
CONFIG = config_flags.DEFINE_config_file(
    "config", None, "Config file, with a :variant if it has variants.", flag_values=FLAGS
)
_WORKDIR = flags.DEFINE_string(
    "workdir", None, "Folder of the run: a new one, or one to resume.", flag_values=FLAGS
)


def main() -> int:
    """The verb."""
    if CONFIG.value is None:
        raise InputError("train needs --config=FILE and --workdir=DIR; see --help")
    if CONFIG.value.init_from or CONFIG.value.model.num_steps is None:
        raise InputError(
            "this config begins with another run's model (config.init_from); give it to "
            "`python -m t5x_diffeq.finetune`"
        )
    workdir = command_line.parse_folder(_WORKDIR, "train")

    from t5x_diffeq.runs.workdir import sole_writer  # JAX and the rest take seconds
    from t5x_diffeq.verbs.train import train

    with sole_writer(workdir):
        return train(Config.of(CONFIG.value), workdir)


class _Verb(type(sys)):  # type: ignore[misc]  # a module
    """This module, which `import t5x_diffeq as td; td.train(config, workdir)` calls."""

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        from t5x_diffeq.verbs.train_in_python import train

        return train(*arguments, **named)


sys.modules[__name__].__class__ = _Verb


if __name__ == "__main__":
    command_line.run(main, __doc__, FLAGS, several=True)
