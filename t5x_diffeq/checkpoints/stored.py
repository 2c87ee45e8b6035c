"""What a checkpoint holds: the train state, and the state of the data as JSON."""

from math import isfinite
from typing import Any, NamedTuple

from t5x_diffeq.training.state import TrainState

ITEMS = ("state", "data")


class DataPosition(NamedTuple):
    """How far a run has gone through its data.

    Attributes:
      drawn: batches that were drawn: one per optimizer step, and those that a rollback left behind.
      streams: the position of each batch row in its documents, if batches are made in the loop.
    """

    drawn: int = 0
    streams: list | None = None


class StoredState(NamedTuple):
    """What a checkpoint holds.

    Attributes:
      step: the optimizer step after which it was saved.
      state: the train state.
      data: the state of the data, as JSON.
      is_local: whether it is a local checkpoint.
    """

    step: int
    state: TrainState
    data: dict
    is_local: bool


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

    @classmethod
    def of(cls, stored: StoredState) -> "RestoredCheckpoint":
        """What is in a stored state; older ones lack some of it."""
        step, state, data, _ = stored
        position = DataPosition(data.get("drawn", step), data.get("places"))
        return cls(state, step, position, data.get("reports"))


def parts_of(state: TrainState) -> dict[str, Any]:
    """The parts of a train state that are there."""
    return {name: part for name, part in vars(state).items() if part is not None}


def data_state_of(
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
