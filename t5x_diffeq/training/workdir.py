"""The workdir of a run: its config, as run, and whether another command may continue it."""

import json

from ml_collections import ConfigDict

from t5x_diffeq.config_files import default_config
from t5x_diffeq.errors import InputError
from t5x_diffeq.files import AnyPath, write_whole

CONFIG_FILE = "config.json"
SECTIONS = {"model", "data", "train", "optimizer", "mesh"}


def check_config(config: ConfigDict, workdir: AnyPath) -> bool:
    """Whether the workdir is new; if not, that `config` continues the run it holds.

    Keys of the mesh and of tasks, `train.total_steps` and how often things are done may differ:
    they don't change which data a step sees. The learning rate follows the schedule of the new
    total.

    Raises:
      InputError: naming the keys that differ and may not.
    """
    if not (workdir / CONFIG_FILE).exists():
        if (workdir / "checkpoints").exists():
            raise InputError(
                f"workdir {workdir} holds checkpoints but no {CONFIG_FILE}, so nothing says what "
                "they are of; restore that file or choose a new --workdir"
            )
        return True
    differing = [
        f"{key} was {old!r}, is {new!r}"
        for key, (old, new) in differences(read_config(workdir), as_json(config)).items()
        if not may_change(key)
    ]
    if differing:
        raise InputError(
            f"workdir {workdir} belongs to another config: {'; '.join(differing)}; "
            "restore these or choose a new --workdir"
        )
    return False


def save_config(config: ConfigDict, workdir: AnyPath) -> None:
    """Writes `config.json`, once nothing speaks against the run any more."""
    write_whole(workdir / CONFIG_FILE, json.dumps(as_json(config), indent=2).encode())


def as_json(config: ConfigDict) -> dict:
    """The config as `config.json` gives it back: tuples become lists."""
    return json.loads(config.to_json())


def may_change(key: str) -> bool:
    """Whether runs of one workdir may differ in `key`."""
    return (
        key.startswith(("mesh.", "tasks."))
        or key.endswith(("_every", "_timeout"))
        or key
        in (
            "train.total_steps",
            "train.keep_checkpoints",
            "train.verify_checkpoints",
            "train.eval_batch_size",
            "train.loss_chunk",
            "train.microbatches",
            "data.read_threads",
        )
    )


def differences(before: dict, now: dict, prefix: str = "") -> dict[str, tuple]:
    """Dotted keys whose values differ: old and new."""
    found = {}
    for key in sorted(before.keys() | now.keys()):
        old, new = before.get(key), now.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            found |= differences(old, new, f"{prefix}{key}.")
        elif old != new:
            found[f"{prefix}{key}"] = (old, new)
    return found


def completed(config: dict, defaults: dict) -> dict:
    """The config with the default of each key that it lacks."""
    return defaults | {
        key: completed(value, defaults[key])
        if isinstance(value, dict) and isinstance(defaults.get(key), dict)
        else value
        for key, value in config.items()
    }


def read_config(workdir: AnyPath) -> dict:
    """`config.json` of a workdir; keys that did not exist when it was written at their defaults.

    Raises:
      InputError: if there is none, or it is no JSON.
    """
    path = workdir / CONFIG_FILE
    try:
        config = json.loads(path.read_text())
        if not (isinstance(config, dict) and config.keys() >= SECTIONS):
            raise ValueError(f"it lacks the sections {', '.join(sorted(SECTIONS))}")
        return completed(config, as_json(default_config()))
    except FileNotFoundError as error:
        raise InputError(f"workdir {workdir} holds no {CONFIG_FILE}; train there first") from error
    except (ValueError, OSError) as error:
        raise InputError(
            f"{path} is not the config of a run: {error}; restore it or choose a new --workdir"
        ) from error
