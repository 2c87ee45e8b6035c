"""Verifies and reads a checkpoint, with one outcome for all processes.

If one process finds damage, the checkpoint is damaged for all processes. A process that can't read
what the others can read (a lost disk, a missing permission) ends the run, and all processes say
which one it was. No process enters a collective of the devices, in which it would wait for the
others, before all have read their parts.
"""

import json
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import Any, NoReturn, TypeVar

import jax
import orbax.checkpoint as ocp
from flax.traverse_util import flatten_dict

from t5x_diffeq.checkpoints import checksums, stored
from t5x_diffeq.checkpoints.checkpoint_folder import best_step, read_facts, whole_steps
from t5x_diffeq.checkpoints.identity import check_owner
from t5x_diffeq.checkpoints.stored import RestoredCheckpoint, RunFacts, TrainState
from t5x_diffeq.cluster.processes import gather
from t5x_diffeq.config.keys.values import BEST
from t5x_diffeq.system.errors import InfrastructureError, InputError, is_infrastructure_failure
from t5x_diffeq.system.files import AnyPath, absolute_path, digest, read_json_object
from t5x_diffeq.system.foreign_files import check_inside

_NEEDED = ("step", "params", "opt_state")  # the parts that every train state has
_DAMAGE = "DATA_LOSS"  # TensorStore's word for what it can't decode
_Result = TypeVar("_Result")


class DamagedError(Exception):
    """A checkpoint is damaged; all processes raise it, with the same message."""


def read_newest(
    folder: AnyPath, steps: Collection[int], abstract_state: TrainState, verify: bool
) -> tuple[RestoredCheckpoint | None, dict[int, str]]:
    """The newest undamaged checkpoint of a workdir, and the damage of newer ones.

    Every process must call it. `steps` must be the same on all processes.
    """
    failures: dict[int, str] = {}
    for step in sorted(steps, reverse=True):
        try:
            return _read_checkpoint(folder / str(step), abstract_state, verify), failures
        except DamagedError as error:
            failures[step] = str(error)
    return None, failures


def _read_checkpoint(
    folder: AnyPath, abstract_state: TrainState, verify: bool
) -> RestoredCheckpoint:
    """What a checkpoint holds; every process must call it.

    The averages and the recent steps are None if the checkpoint lacks them.
    """
    wanted = stored.parts_of(abstract_state)

    def choose(stored: Mapping[str, Any]) -> dict:
        return {name: part for name, part in wanted.items() if name in stored or name in _NEEDED}

    parts = read_parts(folder, choose, verify)
    facts = _do_together(folder, lambda: _read_facts(folder))
    return RestoredCheckpoint(TrainState(**parts), int(folder.name), facts)


def read_parts(folder: AnyPath, choose: Callable[[Mapping[str, Any]], dict], verify: bool) -> dict:
    """Some parts of a saved train state; every process must call it.

    Args:
      choose: gives shapes, dtypes and shardings by part, given the metadata of the stored parts.

    Raises:
      DamagedError: if it is damaged.
      InfrastructureError: if a process can't reach it, or sees other files than the others.
    """

    def read() -> dict:
        # Only the handler: a checkpointer would wait for processes that have failed.
        handler = ocp.PyTreeCheckpointHandler()
        stored = handler.metadata(folder / "state").tree
        abstract = choose(stored)
        if "params" in abstract:  # and not the averages alone
            _check_shapes(folder, abstract["params"], stored["params"])
        args = ocp.args.PyTreeRestore(
            abstract,
            restore_args=ocp.checkpoint_utils.construct_restore_args(abstract),
            partial_restore=abstract.keys() != stored.keys(),
        )
        parts: dict = handler.restore(folder / "state", args=args)
        return parts

    # Before any file is opened: a checkpoint from elsewhere may link to files outside.
    _do_together(folder, lambda: check_inside(folder))
    if verify:
        _do_together(folder, lambda: _verify_files(folder))
    return _do_together(folder, read)


def _check_shapes(folder: AnyPath, abstract: dict, stored: Mapping[str, Any]) -> None:
    wanted, saved = (
        {name: tuple(leaf.shape) for name, leaf in flatten_dict(tree, sep="/").items()}
        for tree in (abstract, stored)
    )
    for name in sorted(wanted.keys() | saved.keys()):
        if wanted.get(name) != saved.get(name):
            raise InputError(
                f"checkpoint {folder} has {saved.get(name, 'no array')} for the parameter {name}, "
                f"but the config makes {wanted.get(name, 'none')}; restore the config"
            )


def _verify_files(folder: AnyPath) -> None:
    if damage := checksums.find_damage(folder, jax.process_index(), jax.process_count()):
        raise DamagedError(damage)


def _read_facts(folder: AnyPath) -> RunFacts:
    data = read_json_object(folder / "data" / "metadata")
    if data.get("step") != int(folder.name):
        raise ValueError(f"data/metadata is not that of step {folder.name}")
    return RunFacts.of(data)


# ------------------------------------------------------------------------------ one outcome


def _do_together(folder: AnyPath, read: Callable[[], _Result]) -> _Result:
    """The result of `read()`, once it has succeeded on all processes."""
    fault = result = None
    try:
        result = read()
    except InputError:
        raise
    except Exception as error:
        if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error):
            raise
        fault = _fault_of(error)
    answers = gather(f"reading checkpoint {folder.name}", fault)
    faults = {process: each for process, each in enumerate(answers) if each}
    if faults:
        _end_together(folder, faults)
    return result  # type: ignore[return-value]  # None only if `read` returns that


def _fault_of(error: BaseException) -> tuple[str, str]:
    """What failed: the "checkpoint", the "process" or the "infrastructure"; and the reason."""
    if "TensorStore details" in str(error) and error.__cause__:  # Orbax's error hides its cause
        error = error.__cause__
    if is_infrastructure_failure(error) and _DAMAGE not in str(error):
        return "infrastructure", stored.root_cause(error)
    missing = isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError)
    denied = (isinstance(error, OSError) and not missing) or "PERMISSION_DENIED" in str(error)
    return "process" if denied else "checkpoint", stored.root_cause(error)


def _end_together(folder: AnyPath, faults: Mapping[int, tuple[str, str]]) -> NoReturn:
    """Raises the same error on all processes."""
    count = jax.process_count()
    for process, (at_fault, reason) in faults.items():
        if at_fault == "infrastructure":
            who = f"process {process}: " if count > 1 else ""
            raise InfrastructureError(f"checkpoint {folder} can't be reached: {who}{reason}")
    same = count == 1 or _is_the_same_everywhere(folder)
    for process, (at_fault, reason) in faults.items():
        if count > 1 and (at_fault == "process" or not same):
            raise InfrastructureError(
                f"process {process} of {count} can't read checkpoint {folder} as others can: "
                f"{reason}; once every process can read it, the same command continues"
            )
    process, (_, reason) = next(iter(faults.items()))
    raise DamagedError(f"process {process}: {reason}" if process else reason)


def _is_the_same_everywhere(folder: AnyPath) -> bool:
    try:
        sizes = checksums.sizes_in(folder)
    except OSError:
        sizes = {}
    seen = gather("the files of a checkpoint", digest([json.dumps(sizes, sort_keys=True).encode()]))
    return len(set(seen)) == 1


# ------------------------------------------------------------------------------ of other runs


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
            f"checkpoint {step} of {workdir} can't be read: {error}; {_others(workdir, step)}"
        ) from error


def _read_params(folder: AnyPath, abstract_params: dict, verify: bool, averages: bool) -> dict:
    """The parameters of a saved train state; with `averages`, averages where there are some."""
    if not averages:
        return read_parts(folder, lambda stored: {"params": abstract_params}, verify)["params"]

    def choose(stored: Mapping[str, Any]) -> dict:
        averaged = stored.get("averages")
        if averaged is None:
            raise InputError(
                f"--averages: checkpoint {folder} has no averages of the parameters; leave the "
                "flag out, or train on, to more train.total_steps, with train.ema_decay"
            )
        others = {name: part for name, part in abstract_params.items() if name not in averaged}
        asked = {"averages": {name: abstract_params[name] for name in averaged}}
        return {**asked, **({"params": others} if others else {})}

    parts = read_parts(folder, choose, verify)
    return {**parts.get("params", {}), **parts["averages"]}


def check_continues(workdir: AnyPath, step: int | None = None) -> None:
    """Checks that training can continue from the checkpoint of a step; None: the newest.

    The checkpoint must have an optimizer's state. If `step` is None, all checkpoints must be the
    run's own. Damage is found later, when the checkpoint is read.
    """
    folder, stored = absolute_path(workdir) / "checkpoints", None
    check_owner(workdir, whole_steps(folder) if step is None else [step])
    with suppress(Exception):
        step = whole_steps(folder)[-1] if step is None else step
    check_inside(folder / str(step))
    with suppress(Exception):
        stored = ocp.PyTreeCheckpointHandler().metadata(folder / str(step) / "state").tree
    if stored and "opt_state" not in stored:
        raise InputError(
            f"checkpoint {step} of {workdir} has no optimizer's state, so no training can continue "
            f"it; tune its model in a new --workdir: finetune --config.init_from={workdir}"
        )


def check_whole(workdir: AnyPath, step: int) -> None:
    """Raises an InputError if a checkpoint is damaged; compares all checksums in one process."""
    folder = absolute_path(workdir) / "checkpoints" / str(step)
    if damage := checksums.find_damage(folder):
        raise InputError(
            f"checkpoint {step} of {workdir} is damaged: {damage}; {_others(workdir, step)}"
        )


def _others(workdir: AnyPath, damaged: int) -> str:
    """The way out if a checkpoint is damaged: the other ones."""
    steps = whole_steps(absolute_path(workdir) / "checkpoints")
    if others := [each for each in steps if each != damaged]:
        return f"choose another one, of {str(others)[1:-1]}"
    return "the run has no other; restore it from a copy, or train again in a new workdir"


def find_step(workdir: AnyPath, step: int | str | None) -> int:
    """The step of the requested checkpoint, which isn't read; None is the newest.

    Raises:
      InputError: if there is no such checkpoint, or another run made it.
    """
    steps = whole_steps(absolute_path(workdir) / "checkpoints")
    if not steps:
        raise InputError(
            f"workdir {workdir} holds no checkpoint yet; train there first, "
            "or wait for the first one of a run that trains (train.checkpoint_every)"
        )
    if step == BEST:
        step = best_step(absolute_path(workdir))
    if step is not None and step not in steps:
        raise InputError(
            f"checkpoint {step} of {workdir} does not exist; there are {str(steps)[1:-1]}"
        )
    chosen = steps[-1] if step is None else int(step)
    check_owner(workdir, [chosen])
    folder = absolute_path(workdir) / "checkpoints" / str(chosen)
    made = read_facts(folder).get("step", chosen)
    if made != chosen:
        raise InputError(f"checkpoint {folder} was made at step {made}; rename its folder to that")
    return chosen
