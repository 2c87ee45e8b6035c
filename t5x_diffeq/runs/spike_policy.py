"""What a run does about spikes: it leaves their updates out, or goes back to a checkpoint."""

from collections.abc import Callable
from math import isfinite

from t5x_diffeq.runs.history import History
from t5x_diffeq.runtime.config import TrainKeys
from t5x_diffeq.runtime.console import say
from t5x_diffeq.runtime.errors import RunError

_MOST_IN_A_ROW = 10  # steps whose values aren't finite
_MOST_ROLLBACKS = 5  # without getting further


class SpikePolicy:
    """Reports and records spikes, and decides what follows from them.

    The train step has found the spike, and has left its update out.

    Args:
      keys: `config.train`.
      history: where spikes are recorded.
    """

    def __init__(self, keys: TrainKeys, history: History):
        self.action, self.history = keys.on_spike, history
        self.not_finite = 0  # steps in a row
        self.rollbacks, self.furthest = 0, 0  # rollbacks without getting past this step

    def take(
        self, step: int, values: dict[str, float], find_cause: Callable[[], str | None]
    ) -> bool:
        """Whether the step is a spike that the run survives; removes `spike` from its values.

        Args:
          step: the optimizer step.
          values: its metrics.
          find_cause: says where values that aren't finite begin, if that can be found.
        """
        loss, norm = values["loss"], values["grad_norm"]
        finite = isfinite(loss) and isfinite(norm)
        self.not_finite = 0 if finite else self.not_finite + 1
        if not values.pop("spike", 0) or self.not_finite > _MOST_IN_A_ROW:
            return False
        cause = find_cause() if self.not_finite == 1 else None
        say(
            f"spike at step {step}: loss {loss:.4f}, gradient norm {norm:.4g}"
            f"{f' ({cause})' if cause else ''}; its update is left out "
            f"({values['spikes']:.0f} so far)"
        )
        # JSON has no NaN.
        facts = {"loss": loss, "grad_norm": norm}
        known = {name: x if isfinite(x) else str(x) for name, x in facts.items()}
        self.history.write("spike", step, **known, count=int(values["spikes"]), cause=cause)
        return True

    def goes_back(self, step: int, checkpoint: int | None) -> bool:
        """Whether a spike at `step` sends the run back to this checkpoint, if there is one.

        Raises:
          RunError: if it was sent back too often without getting further.
        """
        if self.action != "rollback" or checkpoint is None:
            return False
        self.rollbacks = self.rollbacks + 1 if step <= self.furthest else 1
        self.furthest = max(self.furthest, step)
        if self.rollbacks > _MOST_ROLLBACKS:
            raise RunError(
                f"spike at step {step}, the {self.rollbacks}th since the run last got past step "
                f"{self.furthest}, on different data each time, so the data is not the reason; "
                "branch off an older checkpoint (train --branch_from) with a lower "
                "optimizer.learning_rate, or raise train.spike_deviations"
            )
        say(f"going back to checkpoint {checkpoint}, and on with the data after step {step}")
        return True
