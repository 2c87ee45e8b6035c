"""Checkpoints: train state and data state, saved together and asynchronously by Orbax."""

import shutil
from pathlib import Path

import jax
import orbax.checkpoint as ocp

from t5x_diffeq.errors import InputError, RunError
from t5x_diffeq.report import say
from t5x_diffeq.training.state import TrainState


class Checkpoints:
    """The checkpoints of a workdir, newest last.

    Args:
      workdir: holds them under `checkpoints/<step>/`.
      keep: how many of the newest to keep.
      create: whether the folder may be made.
    """

    def __init__(self, workdir: Path, keep: int = 3, create: bool = True):
        self.folder = workdir.absolute() / "checkpoints"  # Orbax takes no relative path
        self.options = ocp.CheckpointManagerOptions(max_to_keep=keep, create=create)
        self.manager = self.open()

    def open(self) -> ocp.CheckpointManager:
        """Orbax's view of the folder as it is now."""
        return ocp.CheckpointManager(
            self.folder, options=self.options, item_names=("state", "data")
        )

    @property
    def latest_step(self) -> int | None:
        """The newest whole checkpoint, if there is any."""
        return self.manager.latest_step()

    def save(self, step: int, state: TrainState, fingerprint: str) -> None:
        """Starts to save; the state of the data is the step and the data's fingerprint."""
        data_state = {"step": step, "fingerprint": fingerprint}
        self.manager.save(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(state), data=ocp.args.JsonSave(data_state)
            ),
            force=True,
        )

    def restore(self, abstract_state: TrainState) -> tuple[TrainState, int] | None:
        """State and step of the newest readable checkpoint, or None if there never was one.

        Unreadable ones are moved aside, into `unreadable_checkpoints/`, and said so.

        Args:
          abstract_state: shapes, dtypes and shardings to restore to.

        Raises:
          RunError: if there are checkpoints and none can be read.
        """
        failure = None
        while (step := self.latest_step) is not None:
            try:
                restored = self.manager.restore(step, args=self.restore_args(abstract_state))
                return restored.state, restored.data["step"]
            except (ValueError, KeyError, OSError, FileNotFoundError) as error:
                failure = first_line(error)
                self.set_aside(step, failure)
        if failure:
            raise RunError(
                f"no checkpoint in {self.folder} can be read (the last failure: {failure}); "
                "they were moved to unreadable_checkpoints/; start again in a new --workdir"
            )
        return None

    def restore_args(self, abstract_state: TrainState) -> ocp.args.Composite:
        """What Orbax is asked for."""
        return ocp.args.Composite(
            state=ocp.args.StandardRestore(abstract_state), data=ocp.args.JsonRestore()
        )

    def set_aside(self, step: int, failure: str) -> None:
        """Moves a checkpoint out of the way, losing nothing."""
        aside = self.folder.parent / "unreadable_checkpoints" / str(step)
        say(f"warning: checkpoint {step} can't be read ({failure}); moved to {aside}")
        self.manager.close()
        if jax.process_index() == 0:
            aside.parent.mkdir(exist_ok=True)
            shutil.rmtree(aside, ignore_errors=True)
            shutil.move(self.folder / str(step), aside)
        self.manager = self.open()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *exception: object) -> None:
        """Waits, also when the run fails: what was saved before is good."""
        self.manager.close()


def restore_params(workdir: Path, abstract_params: dict, step: int | None = None) -> tuple:
    """The parameters alone of a checkpoint, and its step.

    Args:
      workdir: of a run.
      abstract_params: shapes, dtypes and shardings.
      step: which checkpoint; None is the newest.

    Raises:
      InputError: if there is none, or it can't be read.
    """
    checkpoints = Checkpoints(workdir, create=False) if has_checkpoints(workdir) else None
    step = step if step is not None or checkpoints is None else checkpoints.latest_step
    if step is None:
        raise InputError(f"workdir {workdir} holds no checkpoint yet; train there first")
    with ocp.PyTreeCheckpointer() as checkpointer:
        item = {"params": abstract_params}
        args = ocp.args.PyTreeRestore(
            item,
            restore_args=ocp.checkpoint_utils.construct_restore_args(item),
            partial_restore=True,
        )
        try:
            restored = checkpointer.restore(checkpoints.folder / str(step) / "state", args=args)
        except (ValueError, KeyError, OSError) as error:
            raise InputError(
                f"checkpoint {step} of {workdir} can't be read: {first_line(error)}; "
                "choose another one"
            ) from error
    return restored["params"], step


def has_checkpoints(workdir: Path) -> bool:
    """Whether a run has ever begun to save there."""
    return (workdir / "checkpoints").is_dir()


def first_line(error: Exception) -> str:
    """The first line of an error, short."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]
