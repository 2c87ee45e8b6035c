"""Trains a model, or resumes a run: --config=configs/tiny.py --workdir=DIR.

--config.KEY=VALUE changes any key of the config. The same command again resumes the run at its last
checkpoint, or says that it is finished. --branch_from=RUN continues from a checkpoint of another
run, by default with its config: --workdir=DIR --config.train.total_steps=1200. --dry_run checks
whether the run can begin.
"""

import os
from collections.abc import Callable, Sequence
from os import PathLike
from typing import TYPE_CHECKING

from ml_collections import ConfigDict
from ml_collections.config_flags import config_flags

from t5x_diffeq.cli import flag_values
from t5x_diffeq.cli.verb_flags import VerbFlags
from t5x_diffeq.config.config import TUNES, Config, is_run
from t5x_diffeq.config.config_files import CONFIGS, flatten
from t5x_diffeq.config.keys.values import INT32
from t5x_diffeq.system.arguments import checked
from t5x_diffeq.system.errors import InputError
from t5x_diffeq.system.files import AnyPath, parse_path

if TYPE_CHECKING:
    from t5x_diffeq.inference.trained_run import TrainedRun
    from t5x_diffeq.training.hooks.hook import Hook

FLAGS = VerbFlags(__name__)
CONFIG = FLAGS.define_config("Config file, with a :variant if it has variants.")
_WORKDIR = FLAGS.define_text("workdir", "Folder of the run: a new one, or one to resume.")
_BRANCH_FROM = FLAGS.define_text(
    "branch_from",
    "Workdir of another run: the run in --workdir continues from one of its checkpoints.",
)
_BRANCH_STEP = FLAGS.define_integer(
    "branch_step", "The checkpoint's step. [default: the newest]", None, 1, INT32
)
_DRY_RUN = FLAGS.define_switch(
    "dry_run", "Check the config, the data and the memory as a start does, and train nothing."
)


def main() -> int:
    """Runs the verb."""
    if CONFIG.value is None:
        raise InputError("train needs --config=FILE and --workdir=DIR; see --help")
    if CONFIG.value.init_from or CONFIG.value.model.num_steps is None:
        raise InputError(TUNES)
    if _BRANCH_STEP.value is not None and not _BRANCH_FROM.value:
        raise InputError("--branch_step needs --branch_from=DIR, the run that it is a step of")
    if _DRY_RUN.value and _BRANCH_FROM.value:
        raise InputError("--dry_run can't check a branch, which begins with a copy; leave it out")
    workdir = flag_values.parse_folder(_WORKDIR, "train")
    flag_values.check_new_run(workdir)

    from t5x_diffeq.checkpoints.workdir import sole_writer  # importing JAX takes seconds
    from t5x_diffeq.training import loop

    with sole_writer(workdir):
        if _DRY_RUN.value:
            loop.check(Config.of(CONFIG.value), workdir, _hooks())
            return 0
        config = _branch(workdir) if _BRANCH_FROM.value else Config.of(CONFIG.value)
        return train_to_end(config, workdir)


def _branch(workdir: AnyPath) -> Config:
    """The config of a branch; process 0 makes the branch's workdir if it is new."""
    from t5x_diffeq.cluster.processes import run_in_turn
    from t5x_diffeq.training.branch import branch_off

    source = flag_values.parse_folder(_BRANCH_FROM, "train")
    given, values = CONFIG.value, flatten(CONFIG.value)
    has_config = config_flags.get_config_filename(FLAGS["config"]) != str(CONFIGS / "default.py")
    changes = {key: values[key] for key in flag_values.given_keys(FLAGS)}
    return run_in_turn(
        lambda first: branch_off(
            workdir,
            source,
            _BRANCH_STEP.value,
            Config.of(given) if has_config else None,
            changes,
            first,
        ),
        "the branch's workdir is made",
    )


def train_to_end(config: Config, workdir: AnyPath, **given: Callable) -> int:
    """Calls `loop.train` with the hooks of every run and with `given`; returns the exit status."""
    from t5x_diffeq.training import loop

    return loop.train(config, workdir, _hooks(), **given)


def _hooks() -> "Sequence[type[Hook]]":
    from t5x_diffeq.inference.hooks import Samples
    from t5x_diffeq.training.hooks.basic_hooks import Evaluation, MetricsLog
    from t5x_diffeq.training.hooks.profiler import Profiler
    from t5x_diffeq.training.hooks.requests import Requests
    from t5x_diffeq.training.hooks.spike_hook import Spikes
    from t5x_diffeq.training.hooks.watcher import Watcher, WeightFigures

    # In the order in which they are called. WeightFigures is first: it draws in another thread,
    # while Evaluation evaluates the model.
    return (
        *(WeightFigures, Evaluation, Samples),
        *(Profiler, Requests, Watcher, Spikes, MetricsLog),
    )


@checked
def train(config: Config | ConfigDict, workdir: str | PathLike) -> "TrainedRun":
    """Trains a model, or resumes the run in `workdir`; returns the run, loaded.

    Args:
      config: the config, from `load_config` or from a config file's `get_config()`.
      workdir: a new folder, or one whose run is resumed, on this machine or in a bucket.

    Raises:
      InputError: if the config or the data is invalid, or the workdir belongs to another run.
      RunError: if the run fails.
      KeyboardInterrupt: if training was stopped by Ctrl-C, or by a notebook's interrupt, and saved.
        The same call continues, and `load` loads what was saved. In a thread, Ctrl-C doesn't save.
      SystemExit: if it was stopped by SIGTERM and saved, with the verb's exit status, 42.
    """
    from t5x_diffeq.checkpoints.workdir import sole_writer
    from t5x_diffeq.cluster.peers import EXIT_INTERRUPTED
    from t5x_diffeq.inference.trained_run import load

    folder = parse_path(os.fspath(workdir), "workdir")
    flag_values.check_new_run(folder)
    frozen = config if isinstance(config, Config) else Config.of(config)
    if frozen.init_from and not is_run(folder):  # a tuned run can be resumed
        raise InputError(TUNES)
    with sole_writer(folder):
        status = train_to_end(frozen, folder)
    if status == EXIT_INTERRUPTED:
        raise KeyboardInterrupt(
            f"the run is saved: the same call continues it, and load({str(folder)!r}) loads it"
        )
    if status:
        raise SystemExit(status)
    return load(folder)
