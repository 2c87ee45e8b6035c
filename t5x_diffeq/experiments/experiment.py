"""Experiments: trainings, the runs that follow each of them, and the tables of the outcomes.

In a `Sweep` each model is at its best learning rate.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import inf, isfinite
from typing import Any

from t5x_diffeq.config.config import Config
from t5x_diffeq.config.config_files import project_config, values_of
from t5x_diffeq.experiments.present import TableSpec, list_pages
from t5x_diffeq.experiments.runs import ExperimentRun, format_flags, name_choices
from t5x_diffeq.experiments.tokenizers import fill_in_tokenizer
from t5x_diffeq.model.ode.sources import source_of
from t5x_diffeq.system.errors import InputError
from t5x_diffeq.system.files import AnyPath

Keys = Mapping[str, Any]  # values by key of the config
Texts = Mapping[str, Keys]  # by the text's name, the keys of the config for it
Group = tuple[str, str]  # text, model

RATE_NAME = "learning_rate"  # in tables
_WIDTH, _RATE = "model.time_embed_dim", f"optimizer.{RATE_NAME}"
_HALVINGS = 6  # of the rate, while training diverges at every rate


@dataclass(frozen=True)
class Trainee:
    """A model that is trained on each text with each seed."""

    variant: str
    # the keys that it sets; a function computes its key's value from all values of the config
    keys: Keys = field(default_factory=dict)
    model: str | None = None  # its name in tables; None: the variant's
    # the config's file, such as "gpt_small.py"; None: the text's own for a laptop
    config: str | None = None
    rates: tuple[float, ...] = ()  # the learning rates that a sweep begins with

    @property
    def name(self) -> str:
        """Its name in tables."""
        return self.model or self.variant

    def config_for(self, text: str) -> str:
        """The config's file for a text."""
        return self.config or ("shakespeare.py" if text == "shakespeare" else "laptop.py")

    def run(self, text: str, text_keys: Keys, seed: int) -> ExperimentRun:
        """Its run, whose name has everything that distinguishes it, so experiments can share it.

        Its labels are text, size, model, seed, T, and the last part of each key that it sets.
        """
        config = self.config_for(text)
        defaults = values_of(config, self.variant)
        values = {key: x(defaults) if callable(x) else x for key, x in self.keys.items()}
        generated = not source_of(Config().with_values(defaults).model).stored
        changes = {
            key: value
            for key, value in values.items()
            if defaults[key] != value and (generated or key != _WIDTH)
        }
        size = config.removesuffix(".py")
        keys = {
            **changes,
            **fill_in_tokenizer(text_keys, defaults["model.architecture"]),
            "seed": seed,
        }
        words = [*dict.fromkeys((size, text)), self.variant, *name_choices(changes), f"seed={seed}"]
        return ExperimentRun(
            "-".join(words),
            "train",
            (f"--config={project_config(config)}:{self.variant}", *format_flags(keys)),
            {
                "text": text,
                "size": size,
                "model": self.name,
                "seed": seed,
                "T": values.get(_WIDTH, defaults[_WIDTH]) if generated else self.variant,
                **{key.rpartition(".")[2]: value for key, value in values.items()},
            },
        )


def trainings(
    variants: Iterable[str],
    choices: Mapping[str, Iterable[object]] | None = None,
    configs: Mapping[str | None, Keys] | None = None,
) -> tuple[Trainee, ...]:
    """Every variant with every choice of values, in every config.

    Args:
      configs: by config file, the keys that all its trainings set; None: the text's own file.
    """
    choices = choices or {}
    return tuple(
        Trainee(variant, {**keys, **dict(zip(choices, values, strict=True))}, config=config)
        for config, keys in (configs or {None: {}}).items()
        for variant in variants
        for values in product(*choices.values())
    )


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """Runs, and the tables and figures made from their outcomes."""

    trainings: tuple[Trainee, ...] = ()
    # by the name of a text, its trainings where they differ
    trainings_on: Mapping[str, tuple[Trainee, ...]] = field(default_factory=dict)
    # makes the runs that follow a training, whose outcomes are shown instead of its own
    follow_up: Callable[[ExperimentRun], list[ExperimentRun]] | None = None
    others: tuple[ExperimentRun, ...] = ()  # runs that need no text and have no seed
    tables: tuple[TableSpec, ...] = ()
    seeds: int = 3  # number of seeds of each training: the default of --seeds

    def runs(
        self, texts: Texts, seeds: Sequence[int], done: dict[str, dict]
    ) -> list[ExperimentRun]:
        """All runs, or the runs that the outcomes so far determine.

        All models are trained with the first seed, then all with the second. So their times are
        comparable, and a table of an unfinished experiment has all models.

        Raises:
          InputError: if there are too few texts, or too many.
        """
        if self.trainings:
            _need_text(texts)
        runs: list[ExperimentRun] = []
        for text, seed in product(texts, seeds):
            for training in self.trainings_on.get(text, self.trainings):
                runs += self.with_follow_up(training.run(text, texts[text], seed))
        return [*runs, *self.others]

    def with_follow_up(self, run: ExperimentRun) -> list[ExperimentRun]:
        """A training, and the runs that follow it, whose outcomes are shown in its place."""
        following = self.follow_up(run) if self.follow_up else []
        return [replace(run, labels={}), *following] if following else [run]

    def notes(self, outcomes: Sequence[dict], output: AnyPath) -> list[str]:
        """Further paragraphs in Markdown, shown after the tables."""
        return list_pages(outcomes)


def _need_text(texts: Texts) -> None:
    if not texts:
        raise InputError("this experiment needs a text; set --text=NAME=PATH or --text=stdlib")


@dataclass(frozen=True, kw_only=True)
class Sweep(Experiment):
    """Models on every text, each at its best learning rate, with several seeds.

    The first seed tries each model's rates. While the smallest is the best, half of it is tried,
    too, and while the largest is the best, twice of it, so the optimum is interior. A rate at which
    training diverges counts as the worst, and of equal rates the smallest as the best. So a model
    that diverges at every rate is tried with smaller ones, until it is refused. The other seeds run
    only at the optimum. With `follow_up`, the loss that decides is the last follow-up's.

    Attributes:
      key: the key whose values are tried, and called rates here: a learning rate or another key.
      decides: the number of an outcome by which rates are compared; the lowest is the best.
    """

    key: str = _RATE
    decides: str = "loss"
    tables: tuple[TableSpec, ...] = (
        *(TableSpec(("model",), "text", value, RATE_NAME) for value in ("loss", "perplexity")),
        TableSpec(("text", "model"), RATE_NAME, "loss", log=True, same_seeds=True),
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
          first_rates: the rates with which each group begins; None: the rates of its training.

        Raises:
          InputError: if there is no text, or if training diverges at every rate.
        """
        _need_text(texts)
        groups = {(text, each.name): each for text, each in product(texts, self.trainings)}

        def runs_of(group: Group, rate: float, seed: int = seeds[0]) -> list[ExperimentRun]:
            training = at_rate(groups[group], rate, self.key)
            return self.with_follow_up(training.run(group[0], texts[group[0]], seed))

        wanted: dict[Group, Sequence[float]] = {
            group: (first_rates or {}).get(group, x.rates) for group, x in groups.items()
        }
        most_diverging = {group: len(rates) + _HALVINGS for group, rates in wanted.items()}
        losses: dict[Group, dict[float, float]] = {group: {} for group in groups}
        runs: list[ExperimentRun] = []
        while any(wanted.values()):
            tried = [(group, rate) for group, rates in wanted.items() for rate in rates]
            runs += [run for group, rate in tried for run in runs_of(group, rate)]
            if any(each.name not in done for each in runs):
                return runs, {}
            for group, rate in tried:
                losses[group][rate] = done[runs_of(group, rate)[-1].name].get(self.decides, inf)
            for group, by_rate in losses.items():
                if any(map(isfinite, by_rate.values())) or len(by_rate) < most_diverging[group]:
                    continue
                raise InputError(
                    f"{', '.join(group)}: training diverges at each {self.key} that was tried, "
                    f"{', '.join(map(str, sorted(by_rate)))}; read the logs, and change another key"
                )
            wanted = {group: _next_rates(by_rate) for group, by_rate in losses.items()}
        best = {group: _best_rate(by_rate) for group, by_rate in losses.items()}
        others = [
            run
            for group, rate in best.items()
            for seed in seeds[1:]
            for run in runs_of(group, rate, seed)
        ]
        return runs + others, best


def at_rate(training: Trainee, rate: float, key: str = _RATE) -> Trainee:
    """The training with this learning rate, or with this value of another key."""
    return replace(training, keys={**training.keys, key: rate})


def _best_rate(losses: dict[float, float]) -> float:
    """The rate with the lowest loss, and the smallest of equals; infinity and NaN are the worst."""
    return min(losses, key=lambda rate: (losses[rate] if isfinite(losses[rate]) else inf, rate))


def _next_rates(losses: dict[float, float]) -> list[float]:
    """The rates to try next: if the best is the smallest or largest, the neighbour it lacks."""
    best = _best_rate(losses)
    neighbours = {min(losses): best / 2, max(losses): best * 2}
    return [neighbours[best]] if best in neighbours else []
