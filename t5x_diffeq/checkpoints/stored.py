"""What a checkpoint holds: the train state, and facts of the run as JSON."""

from dataclasses import replace
from math import isfinite
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import struct
from jaxtyping import Array

ITEMS = ("state", "data")


@struct.dataclass
class TrainState:
    """Everything that training changes; also a tree of its shapes or shardings."""

    step: Any  # optimizer steps done, an int32 scalar
    params: Any  # the model's parameters, float32
    opt_state: Any  # the optimizer's state for the parts that train
    # the exponential moving averages of the parts that train; None: there are none
    averages: Any = None
    # the last steps, with which a step is compared to find spikes; None: spikes aren't detected
    recent: Any = None

    def with_spikes(self, count: Array) -> "TrainState":
        """The state of a run that has had `count` spikes."""
        if self.recent is None:
            return self
        spikes = jax.device_put(np.asarray(count, np.int32), self.recent.spikes.sharding)
        return replace(self, recent=replace(self.recent, spikes=spikes))

    def averaged_params(self) -> Any:
        """The parameters, with averages in place of the parts that train."""
        return {**self.params, **self.averages}


class RunFacts(NamedTuple):
    """What a checkpoint holds beside the train state; to store another fact, add it here.

    Values must be the same on all processes: what each has of its own is gathered first
    (`processes.gather`).
    """

    fingerprint: str  # of the data
    # batches read, also those that a rollback undid; None: as many as steps
    drawn: int | None = None
    reports: int | None = None  # the number of lines of `metrics.jsonl`, if it is known
    eval_loss: float | None = None  # at this step, if it was evaluated
    # what each hook keeps, by the hook's name: an entry for each process
    hooks: dict[str, list] = {}  # noqa: RUF012
    position: dict | None = None  # in a stream of data; None: the number of batches is enough
    run_id: str | None = None  # filled in by `Checkpoints.save`; None in earlier versions

    def as_json(self, step: int) -> dict:
        """The facts as the checkpoint of `step` stores them."""
        finite = self.eval_loss is not None and isfinite(self.eval_loss)
        return {
            **self._asdict(),
            "step": step,
            "drawn": step if self.drawn is None else self.drawn,
            "eval_loss": self.eval_loss if finite else None,
        }

    @classmethod
    def of(cls, data: dict) -> "RunFacts":
        """The facts that a checkpoint stored; older checkpoints don't have all of them."""
        stored = {name: data[name] for name in cls._fields if name in data}
        return cls(**{"drawn": data["step"], **stored})


class RestoredCheckpoint(NamedTuple):
    """Where a run begins: at a checkpoint, or at its first step."""

    state: TrainState
    step: int = 0
    facts: RunFacts = RunFacts("")

    @property
    def batches_consumed(self) -> int:
        """The batches that were read."""
        return self.step if self.facts.drawn is None else self.facts.drawn


def parts_of(state: TrainState) -> dict[str, Any]:
    """The parts of a train state that are there."""
    return {name: part for name, part in vars(state).items() if part is not None}
