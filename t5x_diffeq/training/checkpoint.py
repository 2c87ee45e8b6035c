"""Checkpoints: train state and data state, saved together and asynchronously by Orbax."""

import jax
import orbax.checkpoint as ocp

from t5x_diffeq.errors import InputError, RunError
from t5x_diffeq.files import AnyPath, absolute, move_folder
from t5x_diffeq.processes import wait_for_all
from t5x_diffeq.report import say
from t5x_diffeq.training.state import TrainState


class Checkpoints:
    """The checkpoints of a workdir, newest last.

    Args:
      workdir: holds them under `checkpoints/<step>/`.
      keep: how many of the newest to keep.
    """

    def __init__(self, workdir: AnyPath, keep: int):
        self.folder = absolute(workdir) / "checkpoints"  # Orbax takes no relative path
        self.options = ocp.CheckpointManagerOptions(max_to_keep=keep, cleanup_tmp_directories=True)
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

    def save(
        self, step: int, state: TrainState, fingerprint: str, places: list | None = None
    ) -> None:
        """Starts to save; the state of the data is the step, its fingerprint and rows' places."""
        data_state = {"step": step, "fingerprint": fingerprint, "places": places}
        self.manager.save(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(state), data=ocp.args.JsonSave(data_state)
            ),
            force=True,
        )

    def restore(
        self, abstract_state: TrainState, fingerprint: str
    ) -> tuple[TrainState, int, list | None] | None:
        """State, step and places of the newest readable checkpoint; None if there never was one.

        Unreadable ones are moved aside, into `unreadable_checkpoints/`, and said so, once an older
        one was read; else nothing is touched.

        Args:
          abstract_state: shapes, dtypes and shardings to restore to.
          fingerprint: of the data, which must be that of the checkpoint.

        Raises:
          RunError: if there are checkpoints and none can be read.
          InputError: if it is of other data.
        """
        failures = {}
        for step in sorted(self.manager.all_steps(), reverse=True):
            try:
                restored = self.manager.restore(step, args=self.restore_args(abstract_state))
            except (ValueError, KeyError, OSError) as error:
                failures[step] = first_line(error)
                continue
            if restored.data["fingerprint"] != fingerprint:
                raise InputError(
                    f"checkpoint {step} of {self.folder} was made on other data; restore that data "
                    "or choose a new --workdir"
                )
            self.set_aside(failures)
            return restored.state, restored.data["step"], restored.data.get("places")
        if failures:
            raise RunError(
                f"no checkpoint in {self.folder} can be read (of {min(failures)}: "
                f"{failures[min(failures)]}); restore one, or start again in a new --workdir"
            )
        return None

    def restore_args(self, abstract_state: TrainState) -> ocp.args.Composite:
        """What Orbax is asked for."""
        return ocp.args.Composite(
            state=ocp.args.StandardRestore(abstract_state), data=ocp.args.JsonRestore()
        )

    def set_aside(self, failures: dict[int, str]) -> None:
        """Moves checkpoints that can't be read out of the way, losing nothing."""
        if not failures:
            return
        self.manager.close()
        for step, failure in failures.items():
            aside = self.folder.parent / "unreadable_checkpoints" / str(step)
            say(f"warning: checkpoint {step} can't be read ({failure}); moved to {aside}")
            if jax.process_index() == 0:
                move_folder(self.folder / str(step), aside)
        wait_for_all("unreadable checkpoints are moved")
        self.manager = self.open()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *exception: object) -> None:
        """Waits, also when the run fails: what was saved before is good."""
        self.manager.close()


def restore_params(workdir: AnyPath, abstract_params: dict, step: int | None = None) -> tuple:
    """The parameters alone of a checkpoint, and its step.

    Args:
      workdir: of a run.
      abstract_params: shapes, dtypes and shardings.
      step: which checkpoint; None is the newest.

    Raises:
      InputError: if there is none, or it can't be read.
    """
    folder = absolute(workdir) / "checkpoints"
    steps = sorted(ocp.utils.checkpoint_steps(folder)) if folder.is_dir() else []
    if not steps:
        raise InputError(f"workdir {workdir} holds no checkpoint yet; train there first")
    step = steps[-1] if step is None else step
    if step not in steps:
        raise InputError(
            f"checkpoint {step} of {workdir} does not exist; there are {', '.join(map(str, steps))}"
        )
    with ocp.PyTreeCheckpointer() as checkpointer:
        item = {"params": abstract_params}
        args = ocp.args.PyTreeRestore(
            item,
            restore_args=ocp.checkpoint_utils.construct_restore_args(item),
            partial_restore=True,
        )
        try:
            restored = checkpointer.restore(folder / str(step) / "state", args=args)
        except (ValueError, KeyError, OSError) as error:
            raise InputError(
                f"checkpoint {step} of {workdir} can't be read: {first_line(error)}; "
                "choose another one"
            ) from error
    return restored["params"], step


def first_line(error: Exception) -> str:
    """The first line of an error, short."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]
