"""What a checkpoint holds: the train state, and facts of the run as JSON."""

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


class RunFacts(NamedTuple):
    """What a checkpoint holds beside the train state; to store one more fact, add it here.

    Values must be the same on all processes: what each has of its own is gathered first
    (`processes.gather`).

    Attributes:
      fingerprint: the data's.
      position: the position in the data; None: after a batch per optimizer step.
      reports: how many lines `metrics.jsonl` had; None if there was none.
      eval_loss: the evaluation's loss at this step, if it was evaluated.
      hooks: what hooks keep, by their names: a value of each process.
    """

    fingerprint: str
    position: DataPosition | None = None
    reports: int | None = None
    eval_loss: float | None = None
    hooks: dict[str, list] = {}  # noqa: RUF012  # never changed

    def as_json(self, step: int) -> dict:
        """As the checkpoint of `step` stores them."""
        drawn, streams = self.position or DataPosition(step)
        finite = self.eval_loss is not None and isfinite(self.eval_loss)
        return {
            "step": step,
            "fingerprint": self.fingerprint,
            "drawn": drawn,
            "places": streams,
            "reports": self.reports,
            "eval_loss": self.eval_loss if finite else None,
            "hooks": self.hooks,
        }

    @classmethod
    def of(cls, data: dict) -> "RunFacts":
        """Those that a checkpoint stored."""
        return cls(
            data["fingerprint"],
            DataPosition(data["drawn"], data["places"]),
            data["reports"],
            data["eval_loss"],
            data["hooks"],
        )


class RestoredCheckpoint(NamedTuple):
    """Where a run begins: at a checkpoint, or at its first step.

    Attributes:
      state: the train state.
      step: the optimizer steps that are done.
      facts: the facts of the run.
    """

    state: TrainState
    step: int = 0
    facts: RunFacts = RunFacts("", DataPosition())

    @property
    def position(self) -> DataPosition:
        """The position in the data."""
        return self.facts.position or DataPosition(self.step)


def parts_of(state: TrainState) -> dict[str, Any]:
    """The parts of a train state that are there."""
    return {name: part for name, part in vars(state).items() if part is not None}
