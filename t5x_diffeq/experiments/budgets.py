"""ODE against baseline at equal optimizer steps, equal time and equal parameters."""

from collections.abc import Sequence
from dataclasses import dataclass

from t5x_diffeq.experiments.comparison import laptop_config, make_training
from t5x_diffeq.experiments.experiment import Experiment, Keys, Texts, need_text
from t5x_diffeq.experiments.present import TableSpec
from t5x_diffeq.experiments.runs import ExperimentRun
from t5x_diffeq.runtime.config_files import values_of


@dataclass(frozen=True)
class _Contender:
    """A model and how long it is trained.

    Attributes:
      name: its name in the tables.
      variant: variant of the config.
      lengths: lengths of its trainings, as multiples of the config's; each has a full schedule.
      keys: keys of the config that it sets.
    """

    name: str
    variant: str
    lengths: tuple[float, ...]
    keys: Keys


def _contenders(N: int, T: int) -> tuple[_Contender, ...]:
    """The baseline, and four ODEs: the config's own, a narrower one, a narrower one whose depth
    grows during training, and one with as many parameters as the baseline.

    W0 and the T matrices of P have as many parameters as N layers if T = N - 1.
    """
    narrow = {"model.time_embed_dim": T // 3}
    growing = {**narrow, "train.depths": (N // 2,), "train.depths_until": 0.5}
    return (
        _Contender("baseline", "baseline", (1, 1.25), {}),
        _Contender("ode", "ode", (1,), {}),
        _Contender("ode, T / 3", "ode", (0.8, 1), narrow),
        _Contender("ode, T / 3, growing", "ode", (1,), growing),
        _Contender("ode, equal parameters", "ode", (1,), {"model.time_embed_dim": N - 1}),
    )


@dataclass(frozen=True, kw_only=True)
class Budgets(Experiment):
    """Every contender at each of its lengths, seed by seed so that times are comparable.

    Attributes:
      config: the config's file; None for the text's own laptop config.
    """

    config: str | None = None

    tables: tuple[TableSpec, ...] = tuple(
        TableSpec(("text", "model"), "total_steps", value) for value in ("loss", "training_seconds")
    )

    def runs(
        self, texts: Texts, seeds: Sequence[int], done: dict[str, dict]
    ) -> list[ExperimentRun]:
        """All runs."""
        need_text(texts)
        made = []
        for text, keys in texts.items():
            config = self.config or laptop_config(text)
            own = values_of(config, "ode")
            made += [
                make_training(
                    config,
                    text,
                    keys,
                    each.variant,
                    {**each.keys, "train.total_steps": round(length * own["train.total_steps"])},
                    seed,
                    each.name,
                )
                for seed in seeds
                for each in _contenders(own["model.num_steps"], own["model.time_embed_dim"])
                for length in each.lengths
            ]
        return made
