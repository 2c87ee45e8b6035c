"""What a checkpoint holds: the train state, and facts of the run as JSON."""

from math import isfinite
from typing import Any, NamedTuple

from t5x_diffeq.training.state import TrainState

ITEMS = ("state", "data")


class RunFacts(NamedTuple):
    """What a checkpoint holds beside the train state; to store another fact, add it here.

    Values must be the same on all processes: what each has of its own is gathered first
    (`processes.gather`).

    Attributes:
      fingerprint: the data's.
      drawn: batches that were drawn: one per optimizer step, and those that a rollback left behind;
        None: one per step.
      reports: how many lines `metrics.jsonl` had; None where none is known.
      eval_loss: the evaluation's loss at this step, if it was evaluated.
      hooks: what hooks keep, by their names: a value of each process.
      position: where a stream of data is; None: the number of batches says it.
    """

    fingerprint: str
    drawn: int | None = None
    reports: int | None = None
    eval_loss: float | None = None
    hooks: dict[str, list] = {}  # noqa: RUF012  # never changed
    position: dict | None = None

    def as_json(self, step: int) -> dict:
        """As the checkpoint of `step` stores them."""
        finite = self.eval_loss is not None and isfinite(self.eval_loss)
        return {
            **self._asdict(),
            "step": step,
            "drawn": step if self.drawn is None else self.drawn,
            "eval_loss": self.eval_loss if finite else None,
        }

    @classmethod
    def of(cls, data: dict) -> "RunFacts":
        """Those that a checkpoint stored; older ones lack some of them."""
        stored = {name: data[name] for name in cls._fields if name in data}
        return cls(**{"drawn": data["step"], **stored})


class RestoredCheckpoint(NamedTuple):
    """Where a run begins: at a checkpoint, or at its first step.

    Attributes:
      state: the train state.
      step: the optimizer steps that are done.
      facts: the facts of the run.
    """

    state: TrainState
    step: int = 0
    facts: RunFacts = RunFacts("")

    @property
    def drawn(self) -> int:
        """The batches that were drawn."""
        return self.step if self.facts.drawn is None else self.facts.drawn


def parts_of(state: TrainState) -> dict[str, Any]:
    """The parts of a train state that are there."""
    return {name: part for name, part in vars(state).items() if part is not None}
