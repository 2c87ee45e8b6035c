"""Checkpoints: train state and data state, saved together and asynchronously by Orbax.

They are verified by checksums before anything is read from them (see `checksums`). `retention` says
which ones are kept, and `local_checkpoints` saves more of them on a local disk or in memory.
"""

import json
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from math import isfinite
from typing import NamedTuple

import jax
import orbax.checkpoint as ocp

from t5x_diffeq.runtime.config import TrainKeys
from t5x_diffeq.runtime.config_keys import BEST
from t5x_diffeq.runtime.console import say
from t5x_diffeq.runtime.errors import InputError, MachineryError, RunError, is_of_machinery
from t5x_diffeq.runtime.files import AnyPath, absolute_path, describe_error, is_in_bucket
from t5x_diffeq.runtime.processes import are_several, first_text, gather_numbers, wait_for_all
from t5x_diffeq.training import checksums
from t5x_diffeq.training.checkpoint_folder import (
    ASIDE,
    identify_run,
    set_aside,
    tidy_checkpoints,
    whole_steps,
)
from t5x_diffeq.training.local_checkpoints import LocalCheckpoints
from t5x_diffeq.training.retention import (
    RetainingManager,
    Retention,
    as_metrics,
    best_step,
    mark_milestones,
)
from t5x_diffeq.training.saves import FinishedSave, SaveTimes, watch
from t5x_diffeq.training.state import TrainState

ITEMS = ("state", "data")
_NEEDED = ("step", "params", "opt_state")  # the parts that every train state has
_FULL = "No space left on device"
_SECONDS_AFTER_FAILURE = 60  # for a save to finish after the run has failed


class DataPosition(NamedTuple):
    """How far a run has gone through its data.

    Attributes:
      drawn: batches that were drawn: one per optimizer step, and those that a rollback left behind.
      streams: the position of each batch row in its documents, if batches are made in the loop.
    """

    drawn: int = 0
    streams: list | None = None


class RestoredCheckpoint(NamedTuple):
    """What a checkpoint holds.

    Attributes:
      state: the train state.
      step: the optimizer step after which it was saved.
      position: the position in the data.
      reports: how many lines `metrics.jsonl` had; None in checkpoints from before 0.2.
    """

    state: TrainState
    step: int = 0
    position: DataPosition = DataPosition()
    reports: int | None = None


class Checkpoints:
    """The checkpoints of a workdir, newest last; all processes must create and use it together.

    Args:
      workdir: contains them as `checkpoints/<step>/`.
      keep: which ones to keep; a number is that of the newest.
      verify: compare checksums before a checkpoint is read.
      local: a folder on a local disk or in memory for local checkpoints; None: there are none.

    Raises:
      InputError: if the local folder can't be used.
    """

    def __init__(
        self,
        workdir: AnyPath,
        keep: int | Retention,
        verify: bool = True,
        local: str | None = None,
    ):
        self.folder = absolute_path(workdir) / "checkpoints"  # Orbax takes no relative path
        self.retention = Retention(keep) if isinstance(keep, int) else keep
        self.verify = verify
        self.saving: int | None = None  # the step whose save may not have finished
        self.times = SaveTimes()
        self._watching: threading.Thread | None = None  # measures the last save
        if jax.process_index() == 0:
            tidy_checkpoints(self.folder)
            mark_milestones(self.folder, self.retention.milestones)
            if local:
                identify_run(workdir)
        wait_for_all("the checkpoints are tidy")
        self.local = (
            LocalCheckpoints(local, workdir, identify_run(workdir), verify) if local else None
        )
        self.manager = self.open()

    @classmethod
    def of(cls, workdir: AnyPath, keys: TrainKeys) -> "Checkpoints":
        """The checkpoints of a workdir as `config.train` wants them."""
        retention = Retention(
            keys.keep_checkpoints,
            keys.keep_every,
            keys.keep_best,
            keys.milestones,
            keys.checkpoint_every if keys.on_spike == "rollback" else None,
        )
        return cls(workdir, retention, keys.verify_checkpoints, keys.local_checkpoints)

    def open(self) -> ocp.CheckpointManager:
        """Orbax's view of the folder as it is now."""
        handlers = ocp.handlers.DefaultCheckpointHandlerRegistry()
        handlers.add("state", ocp.args.StandardSave, checksums.StateHandler())
        handlers.add("data", ocp.args.JsonSave, checksums.DataHandler())
        options = ocp.CheckpointManagerOptions(
            preservation_policy=self.retention.policy(self.folder)
        )
        return RetainingManager(self.folder, options=options, handler_registry=handlers)

    @property
    def latest_step(self) -> int | None:
        """The step of the newest checkpoint, which may still be saving; None if there is none."""
        return self.manager.latest_step()

    # -------------------------------------------------------------------------- saving

    def save(
        self,
        step: int,
        state: TrainState,
        fingerprint: str,
        position: DataPosition | None = None,
        reports: int | None = None,
        eval_loss: float | None = None,
        locally: bool = False,
    ) -> None:
        """Starts to save, once the previous save has finished.

        When it returns, the state's buffers may be reused. The data state is the step, the data's
        fingerprint and the position there, by default after a batch per step.

        With `locally`, the checkpoint goes to the local folder instead, and one that can't be
        written is a warning.

        Raises:
          RunError: if this or the previous checkpoint can't be written.
          MachineryError: if the reason is a bucket or a process that doesn't answer.
        """
        started = time.perf_counter()
        data_state = _data_state(step, fingerprint, position, reports, eval_loss)
        if locally:
            assert self.local, "there is no folder for local checkpoints"
            self.local.save(step, _parts_of(state), data_state, self.times)
            return
        with self._explain():
            self.manager.wait_until_finished()
        self.saving = step
        with self._explain():
            self.manager.save(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.StandardSave(_parts_of(copy_on_cpu(state))),
                    data=ocp.args.JsonSave(data_state),
                ),
                metrics=as_metrics(data_state["eval_loss"]),
                force=True,
            )
        if jax.process_index() == 0:
            self._watch(step, started)

    def _watch(self, step: int, started: float) -> None:
        """Measures a save in another thread, and marks it if it is a milestone."""
        waited, manager = time.perf_counter() - started, self.manager

        def finish(ended: float) -> None:
            if step in self.retention.milestones:
                mark_milestones(self.folder, [step])
            size = checksums.size_of(self.folder / str(step))
            self.times.add(FinishedSave(step, "workdir", size, waited, ended - started))

        self._watching = watch(manager.wait_until_finished, finish)

    def finished_saves(self) -> list[FinishedSave]:
        """The saves that have finished since the last call; only local ones except on process 0.

        Call it once more after the context has ended, which waits for the last save.
        """
        return self.times.take()

    def wait(self) -> None:
        """Returns when the last save has finished.

        Raises:
          RunError, MachineryError: as `save` does.
        """
        with self._explain():
            self.manager.wait_until_finished()
        if self.local:
            self.local.wait()

    def check(self) -> None:
        """Raises if the last save has failed, and says what has been saved; waits for nothing.

        Raises:
          RunError, MachineryError: as `save` does.
        """
        with self._explain():
            self.manager.check_for_errors()
        self.times.say_new()

    @contextmanager
    def _explain(self) -> Iterator[None]:
        """A context that turns what Orbax raises into an error of one line."""
        try:
            yield
        except Exception as error:
            kind = MachineryError if is_of_machinery(error) else RunError
            there = [step for step in whole_steps(self.folder) if step != self.saving]
            raise kind(
                f"checkpoint {self.saving} can't be written to {self.folder}: "
                f"{_FULL if is_full(self.folder) else _root_cause(error)}; "
                f"nothing that was saved before is lost: once this is mended, the same command "
                f"goes on at {f'checkpoint {there[-1]}' if there else 'the start'}"
            ) from error

    # -------------------------------------------------------------------------- restoring

    def rollback_step(self) -> int | None:
        """The step of the checkpoint that a rollback goes to; None if there is none.

        It is the newest that the schedule has made, not a signal, and one of the workdir: so it
        is the same for a run that was stopped and resumed in between.
        """
        made = filter(self.retention.is_scheduled, self.manager.all_steps())
        return max(made, default=None)

    def go_back(self, abstract_state: TrainState, fingerprint: str) -> RestoredCheckpoint:
        """The checkpoint of `rollback_step`; later ones are deleted.

        Raises:
          RunError, MachineryError, InputError: as `restore` does.
        """
        step = self.rollback_step()
        for later in [n for n in self.manager.all_steps() if step is None or n > step]:
            self.manager.delete(later)
        if self.local:
            self.local.remove_after(-1)
        found = self.restore(abstract_state, fingerprint)
        assert found is not None  # the checkpoint of `rollback_step`, or an older one
        return found

    def restore(self, abstract_state: TrainState, fingerprint: str) -> RestoredCheckpoint | None:
        """The newest checkpoint that is undamaged, local or not; None if there never was one.

        A local checkpoint counts if all processes have it. Once an older one has been read, damaged
        ones of the workdir are moved to `unreadable_checkpoints/` with a warning; otherwise nothing
        is touched there.

        Args:
          abstract_state: shapes, dtypes and shardings to restore to.
          fingerprint: the data's fingerprint, which must equal the checkpoint's.

        Raises:
          RunError: if there are checkpoints and none can be read.
          MachineryError: if the disk, bucket or a process doesn't answer.
          InputError: if the checkpoint was made on other data.
        """
        failures = {}
        local_steps = self._agree_on_local_steps()
        of_workdir = set(self.manager.all_steps())
        for step in sorted(of_workdir | local_steps, reverse=True):
            restored = self._read_locally(step, abstract_state) if step in local_steps else None
            is_local = restored is not None
            if not restored and step in of_workdir:
                restored = self.read(step, abstract_state)
            if isinstance(restored, str):
                failures[step] = restored
            if restored is None or isinstance(restored, str):
                continue
            if restored.data["fingerprint"] != fingerprint:
                raise InputError(
                    f"checkpoint {step} of {self.folder} was made on other data; restore that data "
                    "or choose a new --workdir"
                )
            self._set_aside(failures)
            if self.local:
                self.local.remove_after(step)
            if is_local and self.local:
                say(f"checkpoint {step} is restored from {self.local.root}")
            data = restored.data
            position = DataPosition(data.get("drawn", step), data.get("places"))
            return RestoredCheckpoint(restored.state, step, position, data.get("reports"))
        if failures:
            raise RunError(
                f"no checkpoint in {self.folder} can be read (of {max(failures)}: "
                f"{failures[max(failures)]}); restore one, or start again in a new --workdir"
            )
        return None

    def _agree_on_local_steps(self) -> set[int]:
        """The steps whose local checkpoints all processes have; says if some are missing."""
        if not self.local:
            return set()
        steps = gather_numbers(self.local.steps())
        agreed = set.intersection(*steps)
        newest = max(set.union(*steps), default=None)
        if newest is not None and newest not in agreed:
            lacking = [str(process) for process, own in enumerate(steps) if newest not in own]
            say(
                f"local checkpoint {newest} can't be used: process {', '.join(lacking)} of "
                f"{len(steps)} does not have it (another machine, or it was lost while writing)"
            )
        if others := self.local.other_runs():
            say(
                f"note: {self.local.root} also holds {', '.join(path.name for path in others)}, "
                "not of this run; remove what no run needs"
            )
        return agreed

    def _read_locally(self, step: int, abstract_state: TrainState) -> ocp.args.Composite | None:
        """The items of a local checkpoint; None, with a warning, if a process can't read it."""
        assert self.local
        found, failure = self.local.read(step, _parts_of(abstract_state)), None
        if isinstance(found, str):
            failure = f"process {jax.process_index()}: {found}"
        failure = first_text(failure)
        if failure or isinstance(found, str):
            say(f"warning: local checkpoint {step} can't be read ({failure}); trying another")
            return None
        parts, data = found
        return ocp.args.Composite(state=TrainState(**parts), data=data)

    def read(self, step: int, abstract_state: TrainState) -> ocp.args.Composite | str:
        """The items of a checkpoint, or what is wrong with it; the same on all processes."""
        folder = self.folder / str(step)
        failure = _find_damage(folder, self.verify)
        if failure:
            return failure
        state = data = None
        try:
            data = _read_data(folder, step)
            state = _read_state(folder / "state", abstract_state)
        except Exception as error:
            failure = _explain(error, folder)
        failure = first_text(failure)
        return failure or ocp.args.Composite(state=state, data=data)

    def _set_aside(self, failures: dict[int, str]) -> None:
        """Moves unreadable checkpoints to another folder; deletes nothing."""
        if not failures:
            return
        self.manager.close()
        for step, failure in failures.items():
            aside = self.folder.parent / ASIDE / str(step)
            say(f"warning: checkpoint {step} can't be read ({failure}); moved to {aside}")
            if jax.process_index() == 0:
                set_aside(self.folder / str(step))
        wait_for_all("unreadable checkpoints are moved")
        self.manager = self.open()

    # -------------------------------------------------------------------------- ending

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: type | None, *exception: object) -> None:
        """Waits for the save even if the run failed: the state being saved is good."""
        if kind is None:
            with self._explain():
                self.manager.wait_until_finished()
            self._end_quietly()
            return
        # The save may wait for a process that waits for this one, or fail for the same reason.
        closing = threading.Thread(target=_close_quietly, args=(self.manager,), daemon=True)
        closing.start()
        closing.join(_SECONDS_AFTER_FAILURE if are_several() else None)

    def _end_quietly(self) -> None:
        """Ends a run that has saved its last state: local checkpoints are not needed any more."""
        if self._watching:
            self._watching.join()
        newest = self.manager.latest_step()
        self.manager.close()
        if self.local:
            self.local.wait()
            if newest is not None and max(self.local.steps(), default=-1) <= newest:
                self.local.remove()
        self.times.say_new()


def copy_on_cpu(state: TrainState) -> TrainState:
    """The state, or on CPU a copy of it.

    There a host array shares the memory of the device array: Orbax would hold it until all is
    written, and the next training step, which donates the state, would wait for that.
    """
    if jax.local_devices()[0].platform != "cpu":
        return state
    leaves, tree = jax.tree.flatten(state)
    shards = [[shard.data for shard in leaf.addressable_shards] for leaf in leaves]
    # Shard by shard: `device_put` of arrays of several processes would compile a program.
    places = [[shard.sharding for shard in each] for each in shards]
    copies = jax.block_until_ready(jax.device_put(shards, places, may_alias=False))
    arrays = [
        jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, each)
        for leaf, each in zip(leaves, copies, strict=True)
    ]
    return jax.tree.unflatten(tree, arrays)


def _data_state(
    step: int,
    fingerprint: str,
    position: DataPosition | None,
    reports: int | None,
    eval_loss: float | None,
) -> dict:
    """What a checkpoint stores beside the train state."""
    drawn, streams = position or DataPosition(step)
    return {
        "step": step,
        "fingerprint": fingerprint,
        "drawn": drawn,
        "places": streams,
        "reports": reports,
        "eval_loss": eval_loss if eval_loss is not None and isfinite(eval_loss) else None,
    }


def _close_quietly(manager: ocp.CheckpointManager) -> None:
    with suppress(Exception):
        manager.close()


def _parts_of(state: TrainState) -> dict:
    """The parts of a train state that are there."""
    return {name: part for name, part in vars(state).items() if part is not None}


def _read_state(folder: AnyPath, abstract_state: TrainState) -> TrainState:
    """A train state; the averages and the recent steps are None if the checkpoint lacks them."""
    # Only the handler: a checkpointer would wait for processes that have failed.
    handler = ocp.StandardCheckpointHandler()
    wanted, there = _parts_of(abstract_state), handler.metadata(folder).keys()
    asked = {name: part for name, part in wanted.items() if name in there or name in _NEEDED}
    if asked.keys() == there:
        return TrainState(**handler.restore(folder, args=ocp.args.StandardRestore(asked)))
    return TrainState(**_read_parts(folder, asked))


def _find_damage(folder: AnyPath, verify: bool) -> str | None:
    if not verify:
        return None
    try:
        failure = unverified = None
        if checksums.has_checksums(folder):
            part, parts = jax.process_index(), jax.process_count()
            failure = checksums.find_damage(folder, ITEMS, part, parts)
        else:
            unverified = f"checkpoint {folder.name} has no checksums, and is taken as it is"
    except Exception as error:
        failure = _explain(error, folder)
    if unverified := first_text(unverified):
        say(unverified)
    return first_text(failure)


def _read_data(folder: AnyPath, step: int) -> dict:
    data = json.loads((folder / "data" / "metadata").read_text())
    if not (isinstance(data, dict) and data.get("step") == step and "fingerprint" in data):
        raise ValueError(f"data/metadata is not that of step {step}")
    return data


def restore_params(
    workdir: AnyPath,
    abstract_params: dict,
    step: int | str | None = None,
    verify: bool = True,
    averages: bool = False,
) -> tuple:
    """Only the parameters of a checkpoint, and its step.

    Args:
      workdir: the workdir of a run.
      abstract_params: shapes, dtypes and shardings.
      step: the step of the checkpoint, or "best"; None is the newest.
      verify: compare checksums first.
      averages: the moving averages of the parameters that trained, in their place.

    Raises:
      InputError: if there is none, it can't be read, or it has no averages.
      MachineryError: if the bucket or a process doesn't answer.
    """
    folder = absolute_path(workdir) / "checkpoints"
    step = find_step(workdir, step)
    params, failure = None, _find_damage(folder / str(step), verify)
    if not failure:
        try:
            params = _read_params(folder / str(step) / "state", abstract_params, averages)
        except InputError:
            raise
        except Exception as error:
            failure = _explain(error, folder / str(step))
        failure = first_text(failure)
    if failure:
        raise InputError(
            f"checkpoint {step} of {workdir} can't be read: {failure}; choose another one, of "
            f"{_list_steps(whole_steps(folder))}"
        )
    return params, step


def check_whole(workdir: AnyPath, step: int) -> None:
    """Compares the checksums of a checkpoint, on one process alone.

    Raises:
      InputError: if it is damaged.
    """
    folder = absolute_path(workdir) / "checkpoints" / str(step)
    damage = checksums.find_damage(folder, ITEMS) if checksums.has_checksums(folder) else None
    if damage:
        raise InputError(f"checkpoint {step} of {workdir} is damaged: {damage}; choose another one")


def find_step(workdir: AnyPath, step: int | str | None) -> int:
    """The step of the requested checkpoint; nothing is read from it.

    Args:
      workdir: the workdir of a run.
      step: None is the newest, "best" the one with the lowest evaluation loss.

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
            f"checkpoint {step} of {workdir} does not exist; there are {_list_steps(steps)}"
        )
    return steps[-1] if step is None else int(step)


def _list_steps(steps: list[int]) -> str:
    return ", ".join(map(str, steps))


def _read_params(folder: AnyPath, abstract_params: dict, averages: bool) -> dict:
    """The parameters of a saved train state, or the averages of those that have some."""
    if not averages:
        return _read_parts(folder, {"params": abstract_params})["params"]
    averaged = ocp.StandardCheckpointHandler().metadata(folder).get("averages")
    if averaged is None:
        raise InputError(
            f"--averages: checkpoint {folder.parent} has no averages of the parameters; training "
            "makes them with train.ema_decay, which a run can take up when it is resumed"
        )
    others = {name: part for name, part in abstract_params.items() if name not in averaged}
    asked = {"averages": {name: abstract_params[name] for name in averaged}}
    found = _read_parts(folder, {**asked, **({"params": others} if others else {})})
    return {**found.get("params", {}), **found["averages"]}


def _read_parts(folder: AnyPath, parts: dict) -> dict:
    """Some parts of a saved train state, given their shapes; raises whatever Orbax does."""
    args = ocp.args.PyTreeRestore(
        parts,
        restore_args=ocp.checkpoint_utils.construct_restore_args(parts),
        partial_restore=True,
    )
    return ocp.PyTreeCheckpointHandler().restore(folder, args=args)


def _explain(error: Exception, checkpoint: AnyPath) -> str:
    """Why a checkpoint can't be read, if it is the checkpoint's fault."""
    damaged = "DATA_LOSS" in str(error)  # TensorStore's word for what it can't decode
    if is_of_machinery(error) and not damaged:
        raise MachineryError(
            f"checkpoint {checkpoint} can't be reached: {_root_cause(error)}"
        ) from error
    if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error):
        raise error
    return _root_cause(error)


def is_full(folder: AnyPath) -> bool:
    """Whether the disk has less than a MiB left.

    On a full disk, Orbax's threads may raise a secondary error such as "File exists".
    """
    return not is_in_bucket(folder) and shutil.disk_usage(folder).free < 2**20


def _root_cause(error: BaseException) -> str:
    text = describe_error(error)
    for known in (_FULL, "Disk quota exceeded"):
        cause: BaseException | None = error
        while cause is not None:
            if known in str(cause):
                return known
            cause = cause.__cause__ or cause.__context__
    return text[:200]
