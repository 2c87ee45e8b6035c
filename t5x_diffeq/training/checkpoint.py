"""Checkpoints: train state and data state, saved together and asynchronously by Orbax.

They are verified by checksums before anything is read from them (see `checksums`).
"""

import json
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

import jax
import orbax.checkpoint as ocp

from t5x_diffeq.runtime.console import say
from t5x_diffeq.runtime.errors import InputError, MachineryError, RunError, is_of_machinery
from t5x_diffeq.runtime.files import AnyPath, absolute_path, describe_error, is_in_bucket
from t5x_diffeq.runtime.processes import are_several, first_text, wait_for_all
from t5x_diffeq.training import checksums
from t5x_diffeq.training.checkpoint_folder import ASIDE, set_aside, tidy_checkpoints, whole_steps
from t5x_diffeq.training.state import TrainState

ITEMS = ("state", "data")
_FULL = "No space left on device"
_SECONDS_AFTER_FAILURE = 60  # for a save to finish after the run has failed


class RestoredCheckpoint(NamedTuple):
    """What a checkpoint holds.

    Attributes:
      state: the train state.
      step: the optimizer step after which it was saved.
      stream_positions: the position of each batch row in its documents, if batches are made in the
        loop.
      reports: how many lines `metrics.jsonl` had; None in checkpoints from before 0.2.
    """

    state: TrainState
    step: int
    stream_positions: list | None
    reports: int | None


class Checkpoints:
    """The checkpoints of a workdir, newest last; all processes must create and use it together.

    Args:
      workdir: contains them as `checkpoints/<step>/`.
      keep: how many of the newest to keep.
      verify: compare checksums before a checkpoint is read.
    """

    def __init__(self, workdir: AnyPath, keep: int, verify: bool = True):
        self.folder = absolute_path(workdir) / "checkpoints"  # Orbax takes no relative path
        self.options = ocp.CheckpointManagerOptions(max_to_keep=keep)
        self.verify = verify
        self.saving: int | None = None  # the step whose save may not have finished
        if jax.process_index() == 0:
            tidy_checkpoints(self.folder)
        wait_for_all("the checkpoints are tidy")
        self.manager = self.open()

    def open(self) -> ocp.CheckpointManager:
        """Orbax's view of the folder as it is now."""
        handlers = ocp.handlers.DefaultCheckpointHandlerRegistry()
        handlers.add("state", ocp.args.StandardSave, checksums.StateHandler())
        handlers.add("data", ocp.args.JsonSave, checksums.DataHandler())
        return ocp.CheckpointManager(self.folder, options=self.options, handler_registry=handlers)

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
        stream_positions: list | None = None,
        reports: int | None = None,
    ) -> None:
        """Starts to save, once the previous save has finished.

        The data state is the step, the data's fingerprint and the positions of its rows.

        Raises:
          RunError: if this or the previous checkpoint can't be written.
          MachineryError: if the reason is a bucket or a process that doesn't answer.
        """
        data_state = {
            "step": step,
            "fingerprint": fingerprint,
            "places": stream_positions,
            "reports": reports,
        }
        with self._explain():
            self.manager.wait_until_finished()
        self.saving = step
        with self._explain():
            self.manager.save(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.StandardSave(state), data=ocp.args.JsonSave(data_state)
                ),
                force=True,
            )

    def check(self) -> None:
        """Raises if the last save has failed; doesn't wait for it.

        Raises:
          RunError, MachineryError: as `save` does.
        """
        with self._explain():
            self.manager.check_for_errors()

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

    def restore(self, abstract_state: TrainState, fingerprint: str) -> RestoredCheckpoint | None:
        """The newest checkpoint that is undamaged; None if there never was one.

        Once an older one has been read, damaged ones are moved to `unreadable_checkpoints/` with a
        warning; otherwise nothing is touched.

        Args:
          abstract_state: shapes, dtypes and shardings to restore to.
          fingerprint: the data's fingerprint, which must equal the checkpoint's.

        Raises:
          RunError: if there are checkpoints and none can be read.
          MachineryError: if the disk, bucket or a process doesn't answer.
          InputError: if the checkpoint was made on other data.
        """
        failures = {}
        for step in sorted(self.manager.all_steps(), reverse=True):
            restored = self.read(step, abstract_state)
            if isinstance(restored, str):
                failures[step] = restored
                continue
            if restored.data["fingerprint"] != fingerprint:
                raise InputError(
                    f"checkpoint {step} of {self.folder} was made on other data; restore that data "
                    "or choose a new --workdir"
                )
            self._set_aside(failures)
            data = restored.data
            return RestoredCheckpoint(restored.state, step, data.get("places"), data.get("reports"))
        if failures:
            raise RunError(
                f"no checkpoint in {self.folder} can be read (of {max(failures)}: "
                f"{failures[max(failures)]}); restore one, or start again in a new --workdir"
            )
        return None

    def read(self, step: int, abstract_state: TrainState) -> ocp.args.Composite | str:
        """The items of a checkpoint, or what is wrong with it; the same on all processes."""
        folder = self.folder / str(step)
        failure = _find_damage(folder, self.verify)
        if failure:
            return failure
        state = data = None
        try:
            data = _read_data(folder, step)
            # Only the handler: a checkpointer would wait for processes that have failed.
            state = ocp.StandardCheckpointHandler().restore(
                folder / "state", args=ocp.args.StandardRestore(abstract_state)
            )
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
            self.manager.close()
            return
        # The save may wait for a process that waits for this one, or fail for the same reason.
        closing = threading.Thread(target=_close_quietly, args=(self.manager,), daemon=True)
        closing.start()
        closing.join(_SECONDS_AFTER_FAILURE if are_several() else None)


def _close_quietly(manager: ocp.CheckpointManager) -> None:
    with suppress(Exception):
        manager.close()


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
    workdir: AnyPath, abstract_params: dict, step: int | None = None, verify: bool = True
) -> tuple:
    """Only the parameters of a checkpoint, and its step.

    Args:
      workdir: the workdir of a run.
      abstract_params: shapes, dtypes and shardings.
      step: the step of the checkpoint; None is the newest.
      verify: compare checksums first.

    Raises:
      InputError: if there is none, or it can't be read.
      MachineryError: if the bucket or a process doesn't answer.
    """
    folder = absolute_path(workdir) / "checkpoints"
    step = find_step(workdir, step)
    params, failure = None, _find_damage(folder / str(step), verify)
    if not failure:
        try:
            params = _read_params(folder / str(step), abstract_params)["params"]
        except Exception as error:
            failure = _explain(error, folder / str(step))
        failure = first_text(failure)
    if failure:
        raise InputError(
            f"checkpoint {step} of {workdir} can't be read: {failure}; choose another one, of "
            f"{_list_steps(whole_steps(folder))}"
        )
    return params, step


def find_step(workdir: AnyPath, step: int | None) -> int:
    """The step of the requested checkpoint; nothing is read from it.

    Args:
      workdir: the workdir of a run.
      step: None is the newest.

    Raises:
      InputError: if there is no such checkpoint.
    """
    steps = whole_steps(absolute_path(workdir) / "checkpoints")
    if not steps:
        raise InputError(f"workdir {workdir} holds no checkpoint yet; train there first")
    if step is not None and step not in steps:
        raise InputError(
            f"checkpoint {step} of {workdir} does not exist; there are {_list_steps(steps)}"
        )
    return steps[-1] if step is None else step


def _list_steps(steps: list[int]) -> str:
    return ", ".join(map(str, steps))


def _read_params(checkpoint: AnyPath, abstract_params: dict) -> dict:
    """`{"params": ...}` of a checkpoint; raises whatever Orbax does."""
    item = {"params": abstract_params}
    args = ocp.args.PyTreeRestore(
        item,
        restore_args=ocp.checkpoint_utils.construct_restore_args(item),
        partial_restore=True,
    )
    return ocp.PyTreeCheckpointHandler().restore(checkpoint / "state", args=args)


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
