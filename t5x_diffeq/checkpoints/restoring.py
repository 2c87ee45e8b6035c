"""Reading a checkpoint: verified first, by no more processes than must, with one outcome on all.

A checkpoint that is damaged is so for all processes. A process that can't read what the others can
read (its disk is gone, it lacks a permission) ends the run, and all processes say which one it was.
Nobody waits for another in a collective of the devices until all have read their parts.
"""

import json
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple, TypeVar

import jax
import orbax.checkpoint as ocp
from flax.traverse_util import flatten_dict

from t5x_diffeq.checkpoints import checksums
from t5x_diffeq.checkpoints.local_checkpoints import LocalCheckpoints
from t5x_diffeq.checkpoints.replicas import replicas_of
from t5x_diffeq.checkpoints.stored import ITEMS, ReadCheckpoint, parts_of
from t5x_diffeq.checkpoints.writing import root_cause
from t5x_diffeq.runtime.console import say
from t5x_diffeq.runtime.errors import InputError, MachineryError, is_of_machinery
from t5x_diffeq.runtime.files import AnyPath, digest
from t5x_diffeq.runtime.processes import gather
from t5x_diffeq.training.state import TrainState

_NEEDED = ("step", "params", "opt_state")  # the parts that every train state has
_DAMAGE = "DATA_LOSS"  # TensorStore's word for what it can't decode
Found = TypeVar("Found")


class DamagedError(Exception):
    """A checkpoint is damaged; all processes raise it, with the same message."""


def read_newest(
    folder: AnyPath,
    steps: Collection[int],
    local: LocalCheckpoints | None,
    abstract_state: TrainState,
    verify: bool,
) -> tuple[ReadCheckpoint | None, dict[int, str]]:
    """The newest checkpoint that is undamaged, local or not; every process must call it.

    Args:
      folder: the folder of the workdir's checkpoints.
      steps: their steps, the same on all processes.
      local: the local checkpoints, if there may be some.
      abstract_state: shapes, dtypes and shardings to restore to.
      verify: compare checksums first.

    Returns:
      The checkpoint, None if there is none; and what is wrong with each damaged one of the workdir
      that is newer.

    Raises:
      MachineryError: as `read_checkpoint` does.
    """
    failures: dict[int, str] = {}
    local_steps = _agree_on_steps(local) if local else set()
    for step in sorted({*steps, *local_steps}, reverse=True):
        if local and step in local_steps:
            found = _read_locally(local, step, abstract_state)
            if found:
                return found, failures
        if step in steps:
            try:
                return read_checkpoint(folder / str(step), abstract_state, verify), failures
            except DamagedError as error:
                failures[step] = str(error)
    return None, failures


# ------------------------------------------------------------------------------ of the workdir


def read_checkpoint(folder: AnyPath, abstract_state: TrainState, verify: bool) -> ReadCheckpoint:
    """What a checkpoint of the workdir holds; every process must call it.

    The averages and the recent steps are None if the checkpoint lacks them.

    Args:
      folder: the checkpoint's folder, named after its step.
      abstract_state: shapes, dtypes and shardings to restore to.
      verify: compare checksums first.

    Raises:
      DamagedError: if it is damaged.
      MachineryError: if a process can't reach it, or not as the others do.
    """
    wanted = parts_of(abstract_state)

    def choose(there: Mapping[str, Any]) -> dict:
        return {name: part for name, part in wanted.items() if name in there or name in _NEEDED}

    verify_files(folder, verify)
    data = _do_together(folder, lambda: _read_data(folder))
    return ReadCheckpoint(int(folder.name), TrainState(**read_parts(folder, choose)), data, False)


def read_parts(folder: AnyPath, choose: Callable[[Mapping[str, Any]], dict]) -> dict:
    """Some parts of a saved train state; every process must call it.

    Of several replicas of the state, only one is read from storage (see `replicas`).

    Args:
      folder: the checkpoint's folder.
      choose: gives shapes, dtypes and shardings by part, given the metadata of what is there.

    Raises:
      DamagedError, MachineryError: as `read_checkpoint` does.
      InputError: if `choose` does.
    """

    def read() -> tuple[dict, dict | None]:
        # Only the handler: a checkpointer would wait for processes that have failed.
        handler = ocp.PyTreeCheckpointHandler()
        there = handler.metadata(folder / "state").tree
        asked = choose(there)
        if "params" in asked:  # and not the averages alone
            _check_shapes(folder, asked["params"], there["params"])
        replicas = replicas_of(asked)
        if replicas and jax.process_index() not in replicas.readers:
            return asked, None
        own = replicas.on_first(asked) if replicas else asked
        args = ocp.args.PyTreeRestore(
            own,
            restore_args=ocp.checkpoint_utils.construct_restore_args(own),
            partial_restore=asked.keys() != there.keys(),
        )
        return asked, handler.restore(folder / "state", args=args)

    asked, found = _do_together(folder, read)
    replicas = replicas_of(asked)
    if replicas is None:
        assert found is not None  # each process reads its own parts
        return found
    say(
        f"checkpoint {folder.name} was read by {len(replicas.readers)} of {jax.process_count()} "
        f"processes; the others get it over the network, along {' and '.join(replicas.axes)}"
    )
    return replicas.broadcast(asked, found)


def _check_shapes(folder: AnyPath, asked: dict, there: Mapping[str, Any]) -> None:
    """Checks that the parameters of a checkpoint have the shapes that the config makes.

    Raises:
      InputError: if they haven't: `config.json` is not that of the run, say.
    """
    wanted, saved = (
        {name: tuple(leaf.shape) for name, leaf in flatten_dict(tree, sep="/").items()}
        for tree in (asked, there)
    )
    for name in sorted(wanted.keys() | saved.keys()):
        if wanted.get(name) != saved.get(name):
            raise InputError(
                f"checkpoint {folder} has {saved.get(name, 'no array')} for the parameter {name}, "
                f"and the config makes {wanted.get(name, 'none')} of it; restore the config"
            )


def verify_files(folder: AnyPath, verify: bool) -> None:
    """Compares checksums, each process those of its part of the files; every process must call it.

    Args:
      folder: the checkpoint's folder.
      verify: whether to do it at all.

    Raises:
      DamagedError, MachineryError: as `read_checkpoint` does.
    """

    def find_damage() -> None:
        if not checksums.has_checksums(folder):
            say(f"checkpoint {folder.name} has no checksums, and is taken as it is")
            return
        part, parts = jax.process_index(), jax.process_count()
        if damage := checksums.find_damage(folder, ITEMS, part, parts):
            raise DamagedError(damage)

    if verify:
        _do_together(folder, find_damage)


def _read_data(folder: AnyPath) -> dict:
    data = json.loads((folder / "data" / "metadata").read_text())
    if not (
        isinstance(data, dict) and data.get("step") == int(folder.name) and "fingerprint" in data
    ):
        raise ValueError(f"data/metadata is not that of step {folder.name}")
    return data


# ------------------------------------------------------------------------------ one outcome


class _Trouble(NamedTuple):
    """Why a process can't read a checkpoint.

    Attributes:
      reason: one line.
      of: what is at fault: the "checkpoint", the "process", or the "machinery" between them.
    """

    reason: str
    of: str


def _do_together(folder: AnyPath, read: Callable[[], Found]) -> Found:
    """The result of `read()`, once it has succeeded on all processes.

    Raises:
      DamagedError, MachineryError: as `read_checkpoint` does.
      InputError, MemoryError: if `read` does.
    """
    trouble = found = None
    try:
        found = read()
    except InputError:
        raise
    except Exception as error:
        if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error):
            raise
        trouble = _trouble_of(error)
    told = gather(f"reading checkpoint {folder.name}", trouble)
    troubles = {process: _Trouble(*each) for process, each in enumerate(told) if each}
    if troubles:
        _end_together(folder, troubles)
    return found  # type: ignore[return-value]  # None only if `read` returns that


def _trouble_of(error: BaseException) -> _Trouble:
    if "TensorStore details" in str(error) and error.__cause__:  # Orbax's error hides its cause
        error = error.__cause__
    if is_of_machinery(error) and _DAMAGE not in str(error):
        return _Trouble(root_cause(error), "machinery")
    missing = isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError)
    refused = (isinstance(error, OSError) and not missing) or "PERMISSION_DENIED" in str(error)
    return _Trouble(root_cause(error), "process" if refused else "checkpoint")


def _end_together(folder: AnyPath, troubles: dict[int, _Trouble]) -> None:
    """Raises the same error on all processes."""
    several = jax.process_count() > 1
    for process, (reason, of) in troubles.items():
        who = f"process {process}: " if several else ""
        if of == "machinery":
            raise MachineryError(f"checkpoint {folder} can't be reached: {who}{reason}")
    same = not several or _is_the_same_everywhere(folder)
    for process, (reason, of) in troubles.items():
        if several and (of == "process" or not same):
            raise MachineryError(
                f"process {process} of {jax.process_count()} can't read checkpoint {folder} as "
                f"others can: {reason}; once every process can read it, the same command continues"
            )
    process, (reason, _) = next(iter(troubles.items()))
    raise DamagedError(f"process {process}: {reason}" if process else reason)


def _is_the_same_everywhere(folder: AnyPath) -> bool:
    """Whether all processes see the same files, of the same sizes."""
    try:
        sizes = checksums.sizes_in(folder)
    except OSError:
        sizes = {}
    seen = gather("the files of a checkpoint", digest([json.dumps(sizes, sort_keys=True).encode()]))
    return len(set(seen)) == 1


# ------------------------------------------------------------------------------ local ones


def _agree_on_steps(local: LocalCheckpoints) -> set[int]:
    """The steps whose local checkpoints all processes have; says if some are missing."""
    steps = [set(own) for own in gather("local checkpoints", local.steps())]
    agreed = set.intersection(*steps)
    newest = max(set.union(*steps), default=None)
    if newest is not None and newest not in agreed:
        lacking = [str(process) for process, own in enumerate(steps) if newest not in own]
        say(
            f"local checkpoint {newest} can't be used: process {', '.join(lacking)} of "
            f"{len(steps)} does not have it (another machine, or it was lost while writing)"
        )
    if others := local.other_runs():
        say(
            f"note: {local.root} also holds {', '.join(path.name for path in others)}, "
            "not of this run; remove what no run needs"
        )
    return agreed


def _read_locally(
    local: LocalCheckpoints, step: int, abstract_state: TrainState
) -> ReadCheckpoint | None:
    """What a local checkpoint holds; None, with a warning, if a process can't read it."""
    found = local.read(step, parts_of(abstract_state))
    reasons = gather(f"local checkpoint {step}", found if isinstance(found, str) else None)
    failures = [f"process {process}: {each}" for process, each in enumerate(reasons) if each]
    if failures or isinstance(found, str):
        say(f"warning: local checkpoint {step} can't be read ({failures[0]}); trying another")
        return None
    parts, data = found
    return ReadCheckpoint(step, TrainState(**parts), data, True)
