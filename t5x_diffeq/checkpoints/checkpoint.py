"""Checkpoints: train state and data state, saved together and asynchronously by Orbax.

They are verified by checksums before anything is read from them (see `checksums`). `Retention` says
which ones are kept.
"""

import threading
import time
from collections import deque
from contextlib import AbstractContextManager, suppress

import jax
import orbax.checkpoint as ocp

from t5x_diffeq.checkpoints import checkpoint_folder, checksums, stored
from t5x_diffeq.checkpoints.checkpoint_folder import Retention
from t5x_diffeq.checkpoints.identity import new_id, run_of
from t5x_diffeq.checkpoints.restoring import read_newest
from t5x_diffeq.checkpoints.stored import FinishedSave, RestoredCheckpoint, RunFacts, TrainState
from t5x_diffeq.cluster.processes import are_several, gather, wait_for_all
from t5x_diffeq.config.config import TrainKeys
from t5x_diffeq.system.console import log
from t5x_diffeq.system.errors import InputError, RunError
from t5x_diffeq.system.files import AnyPath, absolute_path, describe_error, move_folder

_SECONDS_AFTER_FAILURE = 60  # for a save to finish after the run has failed


class Checkpoints:
    """The checkpoints of a workdir, newest last; all processes must create and use it together.

    Args:
      keep: which checkpoints to keep; a number is how many of the newest.
    """

    def __init__(self, workdir: AnyPath, keep: int | Retention, verify: bool = True):
        checkpoint_folder.check_path(workdir)
        self.folder = absolute_path(workdir) / "checkpoints"  # Orbax takes no relative path
        self.retention = Retention(keep) if isinstance(keep, int) else keep
        self.verify = verify
        self.saving: int | None = None  # the step whose save may not have finished
        self._finished: deque[FinishedSave] = deque()  # which other threads append to
        self._watching: threading.Thread | None = None  # measures the last save
        self._unreadable: RunError | None = None
        own_id = run_of(workdir) or new_id()
        if jax.process_index() == 0:
            checkpoint_folder.mark_copies(self.folder)
            checkpoint_folder.mark_milestones(self.folder, self.retention.milestones)
        self.run_id: str = gather("the run, and its milestones", own_id)[0]
        self.manager = self.open()

    @classmethod
    def of(cls, workdir: AnyPath, train_config: TrainKeys) -> "Checkpoints":
        """The checkpoints of a workdir as `config.train` wants them."""
        retention = Retention(
            train_config.keep_checkpoints,
            train_config.keep_every,
            train_config.keep_best,
            train_config.milestones,
            train_config.checkpoint_every if train_config.on_spike == "rollback" else None,
        )
        return cls(workdir, retention, train_config.verify_checkpoints)

    def open(self) -> ocp.CheckpointManager:
        """Orbax's view of the folder as it is now."""
        handlers = ocp.handlers.DefaultCheckpointHandlerRegistry()
        handlers.add("state", ocp.args.PyTreeSave, checksums.StateHandler())
        handlers.add("data", ocp.args.JsonSave, checksums.DataHandler())
        self.retention.look_up(self.folder)
        options = ocp.CheckpointManagerOptions(
            preservation_policy=self.retention,
            cleanup_tmp_directories=True,  # of interrupted saves
        )
        return ocp.CheckpointManager(self.folder, options=options, handler_registry=handlers)

    @property
    def latest_step(self) -> int | None:
        """The step of the newest checkpoint, which may still be saving; None if there is none."""
        return self.manager.latest_step()

    # -------------------------------------------------------------------------- saving

    def save(self, step: int, state: TrainState, facts: RunFacts) -> None:
        """Starts to save, once the previous save has finished.

        When it returns, the state's buffers may be reused.

        Raises:
          RunError: if this or the previous checkpoint can't be written.
          InfrastructureError: if the reason is a bucket or a process that doesn't answer.
        """
        started = time.perf_counter()
        data_state = facts._replace(run_id=self.run_id).as_json(step)
        with self._explain():
            self.manager.wait_until_finished()
        self.saving = step
        with self._explain():
            # Before the save, in which Orbax asks `retention` which checkpoints to delete. A person
            # may have marked one since the last save.
            self.retention.losses[step] = data_state["eval_loss"]
            marked = checkpoint_folder.marked_steps(self.folder) if jax.process_index() == 0 else []
            self.retention.marked = set(gather("milestones", marked)[0])
            self.manager.save(step, args=stored.items_of(state, data_state), force=True)
        if jax.process_index() == 0:
            waited = time.perf_counter() - started
            arrays = None if self._watching else len(jax.tree.leaves(stored.parts_of(state)))
            arguments = (step, started, waited, arrays)
            self._watching = threading.Thread(target=self._watch, args=arguments, daemon=True)
            self._watching.start()

    def _watch(self, step: int, started: float, waited: float, arrays: int | None) -> None:
        """Measures a save, and marks it if it is a milestone; in a thread of its own.

        If `arrays`, their number, is given, the saved arrays are counted: a run whose checkpoints
        can't be read shall not go on.
        """
        try:
            self.manager.wait_until_finished()
        except Exception:
            return  # `check` raises it
        seconds = time.perf_counter() - started
        if arrays and (fault := self._find_fault(step, arrays)):
            self._unreadable = RunError(
                f"checkpoint {step} in {self.folder} was written, but can't be read: {fault}; "
                "choose another disk or --workdir"
            )
            return
        if step in self.retention.milestones:
            checkpoint_folder.mark_milestones(self.folder, [step])
        size = sum(checksums.sizes_in(self.folder / str(step)).values())
        self._finished.append(FinishedSave(step, size, waited, seconds))

    def _find_fault(self, step: int, arrays: int) -> str | None:
        """Why a checkpoint doesn't have so many arrays; None if it has them."""
        folder = self.folder / str(step)
        try:
            count = checkpoint_folder.count_arrays(folder)
        except Exception as error:  # of TensorStore
            return describe_error(error) if folder.exists() else None  # a later save has deleted it
        return None if count == arrays else f"{count} of its {arrays} arrays are there"

    def finished_saves(self) -> list[FinishedSave]:
        """The saves that have finished since the last call; none except on process 0.

        Prints a line for each. Call it once more after the context has ended, which waits for the
        last save.
        """
        finished = [self._finished.popleft() for _ in range(len(self._finished))]
        for save in finished:
            log(save.line())
        return finished

    def wait(self) -> None:
        """Returns when the last save has finished; raises what `save` does."""
        with self._explain():
            self.manager.wait_until_finished()

    def check(self) -> None:
        """Raises what `save` does if the last save has failed; waits for nothing."""
        with self._explain():
            self.manager.check_for_errors()
        if self._unreadable:
            raise self._unreadable

    def _explain(self) -> AbstractContextManager:
        return stored.explain_failure(self.folder, self.saving, self.manager.all_steps())

    # -------------------------------------------------------------------------- restoring

    def rollback_step(self) -> int | None:
        """The step of the checkpoint that a rollback goes to; None if there is none.

        It is the newest checkpoint of the workdir that was made by the schedule and not because of
        a signal, if there is one. So it is the same if the run was stopped and resumed in between.
        """
        return self.retention.rollback_step(self.manager.all_steps())

    def go_back(self, abstract_state: TrainState, fingerprint: str) -> RestoredCheckpoint:
        """The checkpoint of `rollback_step`, as from `restore`; later ones are deleted."""
        step = self.rollback_step()
        for later in [n for n in self.manager.all_steps() if step is None or n > step]:
            self.manager.delete(later)
        restored = self.restore(abstract_state, fingerprint)
        assert restored is not None  # the checkpoint of `rollback_step`, or an older one
        return restored

    def restore(self, abstract_state: TrainState, fingerprint: str) -> RestoredCheckpoint | None:
        """The newest checkpoint that is undamaged; None if there never was one.

        When an older checkpoint has been read, the damaged ones are moved to
        `unreadable_checkpoints/` with a warning. If none can be read, none is moved.

        Raises:
          RunError: if there are checkpoints and none can be read.
          InfrastructureError: if the disk, bucket or a process doesn't answer.
          InputError: if the checkpoint was made on other data: its fingerprint is another.
        """
        # The steps that process 0 sees, so that all processes read the same checkpoints.
        steps = gather("checkpoints", list(self.manager.all_steps()))[0]
        restored, failures = read_newest(self.folder, steps, abstract_state, self.verify)
        if restored is None:
            if not failures:
                return None
            raise RunError(
                f"no checkpoint in {self.folder} can be read (of {max(failures)}: "
                f"{failures[max(failures)]}); restore one, or start again in a new --workdir"
            )
        if restored.facts.fingerprint != fingerprint:
            raise InputError(
                f"checkpoint {restored.step} of {self.folder} was made on other data; restore that "
                "data or choose a new --workdir"
            )
        self._set_aside(failures)
        return restored

    def _set_aside(self, failures: dict[int, str]) -> None:
        """Moves unreadable checkpoints to another folder; deletes nothing."""
        if not failures:
            return
        self.manager.close()
        for step, failure in failures.items():
            aside = self.folder.parent / checkpoint_folder.ASIDE / str(step)
            log(f"warning: checkpoint {step} can't be read ({failure}); moved to {aside}")
            if jax.process_index() == 0:
                move_folder(self.folder / str(step), aside)
        wait_for_all("unreadable checkpoints are moved")
        self.manager = self.open()

    # -------------------------------------------------------------------------- ending

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: type | None, *exception: object) -> None:
        """Waits for the save even if the run failed: the state being saved is good."""
        if kind is None:
            self.wait()
            if self._watching:
                self._watching.join()
            self.check()
            self.manager.close()
            return

        def close() -> None:
            with suppress(Exception):  # the run has failed for another reason
                self.manager.close()

        # The save may wait for a process that waits for this one, or fail for the same reason.
        closing = threading.Thread(target=close, daemon=True)
        closing.start()
        closing.join(_SECONDS_AFTER_FAILURE if are_several() else None)
