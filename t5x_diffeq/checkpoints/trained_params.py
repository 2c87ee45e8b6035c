"""The parameters of a checkpoint, for whatever uses a trained model."""

from collections.abc import Mapping
from typing import Any

from t5x_diffeq.checkpoints import checksums
from t5x_diffeq.checkpoints.checkpoint_folder import whole_steps
from t5x_diffeq.checkpoints.restoring import DamagedError, read_parts
from t5x_diffeq.checkpoints.retention import best_step
from t5x_diffeq.checkpoints.stored import ITEMS
from t5x_diffeq.config.keys.values import BEST
from t5x_diffeq.system.errors import InputError
from t5x_diffeq.system.files import AnyPath, absolute_path


def restore_params(
    workdir: AnyPath,
    abstract_params: dict,
    step: int | str | None = None,
    verify: bool = True,
    averages: bool = False,
) -> tuple:
    """Only the parameters of a checkpoint, and its step; every process must call it.

    With `averages`, the moving averages of the parameters that trained are in their place.

    Raises:
      InputError: if there is none, it can't be read, or it has no averages.
      InfrastructureError: if the bucket or a process doesn't answer, or only some processes can
        read it.
    """
    folder = absolute_path(workdir) / "checkpoints"
    step = find_step(workdir, step)
    try:
        return _read_params(folder / str(step), abstract_params, verify, averages), step
    except DamagedError as error:
        raise InputError(
            f"checkpoint {step} of {workdir} can't be read: {error}; choose another one, of "
            f"{str(whole_steps(folder))[1:-1]}"
        ) from error


def _read_params(folder: AnyPath, abstract_params: dict, verify: bool, averages: bool) -> dict:
    """The parameters of a saved train state, or the averages of those that have some."""
    if not averages:
        return read_parts(folder, lambda there: {"params": abstract_params}, verify)["params"]

    def choose(there: Mapping[str, Any]) -> dict:
        averaged = there.get("averages")
        if averaged is None:
            raise InputError(
                f"--averages: checkpoint {folder} has no averages of the parameters; training "
                "makes them with train.ema_decay, which a run can take up when it is resumed"
            )
        others = {name: part for name, part in abstract_params.items() if name not in averaged}
        asked = {"averages": {name: abstract_params[name] for name in averaged}}
        return {**asked, **({"params": others} if others else {})}

    parts = read_parts(folder, choose, verify)
    return {**parts.get("params", {}), **parts["averages"]}


def check_whole(workdir: AnyPath, step: int) -> None:
    """Compares the checksums of a checkpoint, on one process alone."""
    folder = absolute_path(workdir) / "checkpoints" / str(step)
    if damage := checksums.find_damage(folder, ITEMS):
        raise InputError(f"checkpoint {step} of {workdir} is damaged: {damage}; choose another one")


def find_step(workdir: AnyPath, step: int | str | None) -> int:
    """The step of the requested checkpoint, which isn't read; None is the newest.

    Raises:
      InputError: if there is no such checkpoint.
    """
    steps = whole_steps(absolute_path(workdir) / "checkpoints")
    if not steps:
        raise InputError(f"workdir {workdir} holds no checkpoint yet; train there first")
    if step == BEST:
        return best_step(absolute_path(workdir))
    if step is not None and step not in steps:
        raise InputError(
            f"checkpoint {step} of {workdir} does not exist; there are {str(steps)[1:-1]}"
        )
    return steps[-1] if step is None else int(step)
