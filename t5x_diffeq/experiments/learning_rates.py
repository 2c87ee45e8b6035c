"""Models compared, each at its best learning rate: tables 1 and 2 of the paper, on a laptop."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from math import inf
from typing import NamedTuple

from t5x_diffeq.experiments.comparison import laptop_config, make_training
from t5x_diffeq.experiments.experiment import Experiment, Keys, Texts, need_text
from t5x_diffeq.experiments.present import TableSpec
from t5x_diffeq.experiments.runs import ExperimentRun
from t5x_diffeq.runtime.config_files import values_of

RATE = "optimizer.learning_rate"
RATE_NAME = "learning_rate"  # in tables
_Group = tuple[str, str]  # text, model


@dataclass(frozen=True)
class SweptModel:
    """A model of a sweep.

    Attributes:
      variant: variant of the config.
      rates: the learning rates to begin with.
      keys: further keys of the config that it sets; in a text, `{num_steps}` is the config's own.
    """

    variant: str
    rates: tuple[float, ...]
    keys: Keys = field(default_factory=dict)


class Progress(NamedTuple):
    """How far the outcomes bring a sweep.

    Attributes:
      runs: the runs that they determine.
      best: by text and model, the best rate; {} while there are still rates to try.
    """

    runs: list[ExperimentRun]
    best: dict[_Group, float]


@dataclass(frozen=True, kw_only=True)
class Sweep(Experiment):
    """Models on every text, each at its best learning rate, with several seeds.

    The first seed tries each model's rates, then half the smallest or twice the largest while
    that one is the best, so the optimum is interior. A rate at which training diverges is the
    worst. The other seeds run only at the optimum.

    Attributes:
      models: by the model's name.
      config: the config's file; None for the text's own laptop config.
    """

    models: dict[str, SweptModel]
    config: str | None = None
    tables: tuple[TableSpec, ...] = (
        *(TableSpec(("model",), "text", value, RATE_NAME) for value in ("loss", "perplexity")),
        TableSpec(("text", "model"), RATE_NAME, "loss", log=True),
    )

    def runs(
        self, texts: Texts, seeds: Sequence[int], done: dict[str, dict]
    ) -> list[ExperimentRun]:
        """The runs that the outcomes so far determine.

        Runs come in rounds, each added when the previous round is done. A new round leaves the
        order of earlier runs unchanged, so the jobs of an array agree on which runs are whose.
        """
        return self.progress(texts, seeds, done).runs

    def progress(self, texts: Texts, seeds: Sequence[int], done: dict[str, dict]) -> Progress:
        """The runs of `runs`, and the best rates, once they are known."""
        need_text(texts)

        def run(group: _Group, rate: float, seed: int = seeds[0]) -> ExperimentRun:
            return self.training(texts, group, {RATE: rate}, seed)

        wanted: dict[_Group, Sequence[float]] = {
            (text, name): self.models[name].rates for text, name in product(texts, self.models)
        }
        tried: dict[_Group, dict[float, float]] = {group: {} for group in wanted}
        made: list[ExperimentRun] = []
        while any(wanted.values()):
            made += [run(group, rate) for group in wanted for rate in wanted[group]]
            if any(each.name not in done for each in made):
                return Progress(made, {})
            for group, rates in wanted.items():
                found = {rate: done[run(group, rate).name] for rate in rates}
                tried[group] |= {rate: each.get("loss", inf) for rate, each in found.items()}
            wanted = {group: _next_rates(losses) for group, losses in tried.items()}
        best = {group: min(losses, key=losses.__getitem__) for group, losses in tried.items()}
        others = [run(group, best[group], seed) for group in tried for seed in seeds[1:]]
        return Progress(made + others, best)

    def training(self, texts: Texts, group: _Group, choice: Keys, seed: int) -> ExperimentRun:
        """One training of a model on a text."""
        text, name = group
        model = self.models[name]
        config = self.config or laptop_config(text)
        steps = values_of(config, model.variant)["model.num_steps"]
        keys = {
            key: value.format(num_steps=steps) if isinstance(value, str) else value
            for key, value in model.keys.items()
        }
        own = {**keys, **choice}
        return make_training(config, text, texts[text], model.variant, own, seed, name)


def _next_rates(losses: dict[float, float]) -> list[float]:
    """The rates to try next: the neighbour that the best one lacks, if it is at an end."""
    best = min(losses, key=losses.__getitem__)
    neighbours = {min(losses): best / 2, max(losses): best * 2}
    return [neighbours[best]] if best in neighbours else []
