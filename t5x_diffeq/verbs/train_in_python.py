"""Training from Python: what the verb `train` does, in this process."""

from os import PathLike

from ml_collections import ConfigDict

from t5x_diffeq.inference.trained_run import TrainedRun, load
from t5x_diffeq.runs.workdir import sole_writer
from t5x_diffeq.runtime.config import Config
from t5x_diffeq.runtime.files import parse_path
from t5x_diffeq.verbs.train import train as train_to_the_end


def train(config: Config | ConfigDict, workdir: str | PathLike) -> TrainedRun:
    """Trains a model, or resumes the run in `workdir`; returns the run, loaded.

    Args:
      config: the config, from `load_config` or from a config file's `get_config()`.
      workdir: a new folder, or one whose run is resumed, on this machine or in a bucket.

    Raises:
      InputError: if the config or the data is invalid, or the workdir belongs to another run.
      RunError: if the run fails.
      SystemExit: if training was stopped and saved, with the verb's exit status: 42 after SIGTERM,
        130 after Ctrl-C. The same call continues.
    """
    folder = parse_path(str(workdir), "workdir")
    checked = config if isinstance(config, Config) else Config.of(config)
    with sole_writer(folder):
        status = train_to_the_end(checked, folder)
    if status:
        raise SystemExit(status)
    return load(workdir)
