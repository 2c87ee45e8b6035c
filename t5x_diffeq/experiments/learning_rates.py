"""Models compared, each at its best learning rate: after equal steps, and in equal time."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import inf

from t5x_diffeq.experiments.experiment import Experiment, Texts, Training, need_text
from t5x_diffeq.experiments.present import TableSpec
from t5x_diffeq.experiments.runs import ExperimentRun, format_flags
from t5x_diffeq.runtime.config_files import values_of

_RATE = "optimizer.learning_rate"
_RATE_NAME = "learning_rate"  # in tables
_RATIO = "model / baseline: step_ms"
Group = tuple[str, str]  # text, model


@dataclass(frozen=True, kw_only=True)
class Sweep(Experiment):
    """Models on every text, each at its best learning rate, with several seeds.

    The first seed tries each model's rates, then half the smallest or twice the largest while
    that one is the best, so the optimum is interior. A rate at which training diverges is the
    worst. The other seeds run only at the optimum.
    """

    tables: tuple[TableSpec, ...] = (
        *(TableSpec(("model",), "text", value, _RATE_NAME) for value in ("loss", "perplexity")),
        TableSpec(("text", "model"), _RATE_NAME, "loss", log=True, same_seeds=True),
    )

    def runs(
        self, texts: Texts, seeds: Sequence[int], done: dict[str, dict]
    ) -> list[ExperimentRun]:
        """The runs that the outcomes so far determine.

        Runs come in rounds, each added when the previous round is done. A new round leaves the
        order of earlier runs unchanged, so the jobs of an array agree on which runs are whose.
        """
        return self.progress(texts, seeds, done)[0]

    def progress(
        self,
        texts: Texts,
        seeds: Sequence[int],
        done: dict[str, dict],
        first_rates: Mapping[Group, Sequence[float]] | None = None,
    ) -> tuple[list[ExperimentRun], dict[Group, float]]:
        """The runs; and each group's best rate, {} while there are still rates to try.

        Args:
          texts: the texts to train on.
          seeds: seeds of the trainings.
          done: outcomes so far, by the name of their run.
          first_rates: the rates with which each group begins; None for those of its training.
        """
        need_text(texts)
        groups = {(text, each.name): each for text, each in product(texts, self.trainings)}

        def run(group: Group, rate: float, seed: int = seeds[0]) -> ExperimentRun:
            return at_rate(groups[group], rate).run(group[0], texts[group[0]], seed)

        wanted: dict[Group, Sequence[float]] = {
            group: (first_rates or {}).get(group, x.rates) for group, x in groups.items()
        }
        losses: dict[Group, dict[float, float]] = {group: {} for group in groups}
        runs: list[ExperimentRun] = []
        while any(wanted.values()):
            runs += [run(group, rate) for group, rates in wanted.items() for rate in rates]
            if any(each.name not in done for each in runs):
                return runs, {}
            for group, rates in wanted.items():
                for rate in rates:
                    losses[group][rate] = done[run(group, rate).name].get("loss", inf)
            wanted = {group: _next_rates(tried) for group, tried in losses.items()}
        best = {group: min(tried, key=tried.__getitem__) for group, tried in losses.items()}
        others = [run(group, rate, seed) for group, rate in best.items() for seed in seeds[1:]]
        return runs + others, best


def at_rate(training: Training, rate: float) -> Training:
    """The training with this learning rate."""
    return replace(training, keys={**training.keys, _RATE: rate})


def _next_rates(losses: dict[float, float]) -> list[float]:
    """The rates to try next: the neighbour that the best one lacks, if it is at an end."""
    best = min(losses, key=losses.__getitem__)
    neighbours = {min(losses): best / 2, max(losses): best * 2}
    return [neighbours[best]] if best in neighbours else []


@dataclass(frozen=True, kw_only=True)
class EqualTime(Sweep):
    """A sweep of the learning rate, then each model at its best in the time of the baseline.

    The steps of each model are timed in turns with those of a baseline that has its keys. A model
    whose step takes r times as long, r > 1, then trains for 1 / r of the steps, with a schedule of
    that length. If r is at most 1, equal steps are no more than equal time, and stand for it.

    Attributes:
      config: the config's file.
    """

    config: str
    tables: tuple[TableSpec, ...] = (
        TableSpec(("text", "budget"), "model", "loss", _RATE_NAME, over_steps=True),
        TableSpec(("text", "budget"), "model", "perplexity", _RATE_NAME),
        TableSpec(("text", "model"), _RATE_NAME, "loss", log=True, same_seeds=True),
    )

    def runs(
        self, texts: Texts, seeds: Sequence[int], done: dict[str, dict]
    ) -> list[ExperimentRun]:
        """The runs that the outcomes so far determine."""
        timings = self._timings()
        swept, best = self.progress(texts, seeds, done)
        runs = [*timings.values(), *_with_budget(swept, "equal steps")]
        if not best or any(run.name not in done for run in timings.values()):
            return runs
        steps = values_of(self.config, "baseline")["train.total_steps"]
        models = {training.name: training for training in self.trainings}
        for (text, name), rate in best.items():
            ratio = done[timings[name].name][_RATIO] if name in timings else 1.0
            fewer = round(steps / max(ratio, 1.0))
            if fewer != steps:
                shorter = at_rate(models[name], rate)
                shorter = replace(shorter, keys={**shorter.keys, "train.total_steps": fewer})
                again = [shorter.run(text, texts[text], seed) for seed in seeds]
                runs += _with_budget(again, "equal time")
        return runs

    def _timings(self) -> dict[str, ExperimentRun]:
        """By model, the times of its steps and of those of the baseline with the same keys."""
        size, timings = self.config.removesuffix(".py"), {}
        for training in self.trainings:
            if training.variant != "baseline":
                name = "-".join(("timing", size, *training.name.split()))
                config = f"--config=configs/{self.config}:{training.variant}"
                arguments = (config, *format_flags(training.keys))
                timings[training.name] = ExperimentRun(name, "benchmark", arguments)
        return timings


def _with_budget(runs: Sequence[ExperimentRun], budget: str) -> list[ExperimentRun]:
    return [replace(run, labels={**run.labels, "budget": budget}) for run in runs]
