"""Loss against learning rate at several numbers of steps or layers: does one rate suit them all?

With `model.step_size=c/N` nothing else of the ODE is scaled with N: P gets the sum of N gradients,
each proportional to 1/N. Per-layer weights get gradients proportional to 1/N, so Adam's epsilon is
scaled likewise, as in CompleteP (Dey et al. 2025), relative to 4 layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product

from t5x_diffeq.experiments.comparison import laptop_config, make_training
from t5x_diffeq.experiments.experiment import Experiment, Keys, Texts, need_text
from t5x_diffeq.experiments.present import TableSpec
from t5x_diffeq.experiments.runs import ExperimentRun
from t5x_diffeq.runtime.config_files import values_of

_SCALED_MODELS = {  # variant of the config, and step size
    "ODE, dt = 1/N": ("ode", "1/N"),
    "ODE, dt = 2/N": ("ode", "2/N"),
    "ODE, dt = 4/N": ("ode", "4/N"),
    "ODE, dt = 1": ("ode", "1"),
    "per layer, dt = 4/N": ("baseline", "4/N"),
    "per layer, dt = 1": ("baseline", "1"),
}


@dataclass(frozen=True, kw_only=True)
class DepthTransfer(Experiment):
    """Every model at every number of steps with every learning rate.

    Attributes:
      rates: the learning rates.
      depths: the numbers of steps or layers.
      keys: further keys of the config that all runs set.
      config: the config's file; None for the text's own laptop config.
    """

    rates: tuple[float, ...]
    depths: tuple[int, ...] = (4, 8, 16, 32)
    keys: Keys = field(default_factory=dict)
    config: str | None = None
    tables: tuple[TableSpec, ...] = (
        TableSpec(("text", "model", "num_steps"), "learning_rate", "loss", log=True, panels=2),
    )
    seeds: int = 1

    def runs(
        self, texts: Texts, seeds: Sequence[int], done: dict[str, dict]
    ) -> list[ExperimentRun]:
        """All runs."""
        need_text(texts)
        found = product(texts, _SCALED_MODELS, self.depths, self.rates, seeds)
        return [self._training(texts, *each) for each in found]

    def _training(
        self, texts: Texts, text: str, model: str, steps: int, rate: float, seed: int
    ) -> ExperimentRun:
        config = self.config or laptop_config(text)
        variant, step_size = _SCALED_MODELS[model]
        choice = {
            **self.keys,
            "model.num_steps": steps,
            "model.step_size": step_size,
            "optimizer.learning_rate": rate,
        }
        if variant == "baseline" and step_size != "1":
            epsilon = values_of(config, variant)["optimizer.epsilon"]
            choice["optimizer.epsilon"] = epsilon * 4 / steps
        return make_training(config, text, texts[text], variant, choice, seed, model)
