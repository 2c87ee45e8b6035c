"""Trains a model, or resumes a run: --config=configs/tiny.py --workdir=DIR.

--config.KEY=VALUE changes any key of the config. The same command again resumes the run at its last
checkpoint, or says that it is finished. --branch_from=RUN continues from a checkpoint of another
run, by default with its config: --workdir=DIR --config.train.total_steps=1200.
"""

from absl import flags
from ml_collections.config_flags import config_flags

from t5x_diffeq.runtime import command_line
from t5x_diffeq.runtime.config import Config
from t5x_diffeq.runtime.config_files import config_file, flatten
from t5x_diffeq.runtime.errors import InputError
from t5x_diffeq.runtime.files import AnyPath
from t5x_diffeq.runtime.keys.values import INT32

FLAGS = flags.FlagValues()
CONFIG = config_flags.DEFINE_config_file(
    "config", None, "Config file, with a :variant if it has variants.", flag_values=FLAGS
)
_WORKDIR = flags.DEFINE_string(
    "workdir", None, "Folder of the run: a new one, or one to resume.", flag_values=FLAGS
)
_BRANCH_FROM = flags.DEFINE_string(
    "branch_from",
    None,
    "Workdir of another run: the run in --workdir continues from one of its checkpoints.",
    flag_values=FLAGS,
)
_BRANCH_STEP = flags.DEFINE_integer(
    "branch_step",
    None,
    "The checkpoint's step. [default: the newest]",
    1,
    INT32,
    flag_values=FLAGS,
)


def main() -> int:
    """Runs the verb."""
    if CONFIG.value is None:
        raise InputError("train needs --config=FILE and --workdir=DIR; see --help")
    if CONFIG.value.init_from or CONFIG.value.model.num_steps is None:
        raise InputError(
            "this config begins with another run's model (config.init_from); give it to "
            "`python -m t5x_diffeq.finetune`"
        )
    if _BRANCH_STEP.value is not None and not _BRANCH_FROM.value:
        raise InputError("--branch_step needs --branch_from=DIR, the run that it is a step of")
    workdir = command_line.parse_folder(_WORKDIR, "train")

    from t5x_diffeq.runs.workdir import sole_writer  # importing JAX takes seconds
    from t5x_diffeq.verbs.train import train

    with sole_writer(workdir):
        return train(_branch(workdir) if _BRANCH_FROM.value else Config.of(CONFIG.value), workdir)


def _branch(workdir: AnyPath) -> Config:
    """The config of a branch; process 0 makes its workdir if that is new."""
    from t5x_diffeq.runs.branch import branch_off
    from t5x_diffeq.runtime.processes import run_in_turn

    source = command_line.parse_folder(_BRANCH_FROM, "train")
    given, values = CONFIG.value, flatten(CONFIG.value)
    is_own = config_flags.get_config_filename(FLAGS["config"]) != str(config_file("default.py"))
    changes = {key: values[key] for key in command_line.given_keys(FLAGS)}
    return run_in_turn(
        lambda first: branch_off(
            workdir,
            source,
            _BRANCH_STEP.value,
            Config.of(given) if is_own else None,
            changes,
            first,
        ),
        "the branch's workdir is made",
    )


if __name__ == "__main__":
    command_line.run(main, __doc__, FLAGS, several=True)
