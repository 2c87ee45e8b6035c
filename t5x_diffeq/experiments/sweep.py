"""Models compared on a laptop, each at its best learning rate: tables 1 and 2 of the paper."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from t5x_diffeq.experiments.comparison import laptop_config, make_training
from t5x_diffeq.experiments.experiment import Experiment, Texts, need_text
from t5x_diffeq.experiments.runs import ExperimentRun

_SweepGroup = tuple[str, str]  # text, variant


@dataclass(frozen=True, kw_only=True)
class Sweep(Experiment):
    """Variants on every text, each at the best value of one key, with several seeds.

    The first seed tries each variant's values, then half the smallest or twice the largest while
    that one is the best, so the optimum is interior. The other seeds run only at the optimum.

    Attributes:
      key: the key of the config.
      variants: by variant, the values to begin with.
    """

    key: str
    variants: dict[str, tuple[float, ...]]

    def runs(
        self, texts: Texts, seeds: Sequence[int], done: dict[str, dict]
    ) -> list[ExperimentRun]:
        """The runs that the outcomes so far determine.

        Runs come in rounds, each added when the previous round is done. A new round leaves the
        order of earlier runs unchanged, so the jobs of an array agree on which runs are whose.
        """
        need_text(texts)

        def run(group: _SweepGroup, value: float, seed: int) -> ExperimentRun:
            text, variant = group
            choice = {self.key: value}
            return make_training(laptop_config(text), text, texts[text], variant, choice, seed)

        def loss(group: _SweepGroup, value: float) -> float:
            return done[run(group, value, seeds[0]).name]["loss"]

        tried: dict[_SweepGroup, dict[float, float]] = {
            group: {} for group in product(texts, self.variants)
        }
        wanted: dict[_SweepGroup, Sequence[float]] = {g: self.variants[g[1]] for g in tried}
        made: list[ExperimentRun] = []
        while any(wanted.values()):
            made += [run(group, value, seeds[0]) for group in wanted for value in wanted[group]]
            if any(each.name not in done for each in made):
                return made
            for group, values in wanted.items():
                tried[group] |= {value: loss(group, value) for value in values}
            wanted = {group: _next_values(losses) for group, losses in tried.items()}
        best = {group: min(losses, key=losses.__getitem__) for group, losses in tried.items()}
        return made + [run(group, best[group], seed) for group in tried for seed in seeds[1:]]


def _next_values(losses: dict[float, float]) -> list[float]:
    """The values to try next: the neighbour that the best value lacks, if it is at an end."""
    best = min(losses, key=losses.__getitem__)
    neighbours = {min(losses): best / 2, max(losses): best * 2}
    return [neighbours[best]] if best in neighbours else []
