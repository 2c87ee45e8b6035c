"""A ladder of sizes: does the lead over the baseline grow, stay or shrink with compute?

Each rung is a width of configs/ladder.py. The first rung sweeps the learning rate of each model.
The second tries half, the same and twice that rate, and further rungs follow from both. The
recurrence-equivalence exponent phi says how many unique layers the N steps of a model that shares
weights are worth: N^phi (arXiv 2604.21106).
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import inf, log
from statistics import mean
from typing import NamedTuple

import numpy as np
from scipy.optimize import least_squares

from t5x_diffeq.experiments.experiment import Keys, Texts, Training
from t5x_diffeq.experiments.learning_rates import Sweep, at_rate
from t5x_diffeq.experiments.present import TableSpec, format_lines, mean_and_error
from t5x_diffeq.experiments.runs import ExperimentRun
from t5x_diffeq.runtime.files import AnyPath

WIDTHS = (64, 96, 144, 192, 384, 768)  # of configs/ladder.py
_CONFIG, _RATES = "ladder.py", (2e-3, 4e-3)
_SEEDED_RUNGS = 2  # rungs on which all seeds run
_STARTS = (0.2, 0.5, 0.8)  # of phi, from which the fit begins
_UNKNOWNS = 5  # of the fit
_Choice = tuple[str, str]  # text, model

# By name: the variant, and the keys that it sets.
MODELS: dict[str, tuple[str, Keys]] = {
    variant: (variant, {}) for variant in ("baseline", "compact", "smooth", "shared")
}
MODELS_OF_PHI: dict[str, tuple[str, Keys]] = {  # on the rungs with all seeds alone
    "ode": ("ode", {}),
    "compact, T = 2": (
        "compact",
        {"model.time_embed_dim": 2, "model.attention_time_embed_dim": 2},
    ),
}


def _training(model: str, width: int) -> Training:
    variant, keys = {**MODELS, **MODELS_OF_PHI}[model]
    return Training(f"{variant}-{width}", keys, model, _CONFIG, _RATES)


@dataclass(frozen=True, kw_only=True)
class Ladder(Sweep):
    """Trainings on each rung, from the smallest; tables show the rungs that are done."""

    tables: tuple[TableSpec, ...] = (TableSpec(("text", "model"), "width", "loss", "rule"),)

    def runs(
        self, texts: Texts, seeds: Sequence[int], done: dict[str, dict]
    ) -> list[ExperimentRun]:
        """The runs that the outcomes so far determine, rung by rung."""
        every = {**MODELS, **MODELS_OF_PHI}
        first = Sweep(trainings=tuple(_training(model, WIDTHS[0]) for model in every))
        runs, best = first.progress(texts, seeds, done)
        runs = [_labelled(run, WIDTHS[0]) for run in runs]
        if not best:
            return runs
        tried: dict[_Choice, dict[float, ExperimentRun]] = {
            (text, model): {
                factor * rate: self._run(texts, text, model, WIDTHS[1], factor * rate, seeds[0])
                for factor in (0.5, 1, 2)
            }
            for (text, model), rate in best.items()
        }
        runs += [run for by_rate in tried.values() for run in by_rate.values()]
        if any(run.name not in done for run in runs):
            return runs
        second = {
            choice: min(by_rate, key=lambda r: done[by_rate[r].name].get("loss", inf))
            for choice, by_rate in tried.items()
        }
        for width, (text, model), seed in product(WIDTHS[1:], best, seeds):
            choice = text, model
            seeded = WIDTHS.index(width) < _SEEDED_RUNGS
            if (seeded or seed == seeds[0]) and (seeded or model in MODELS):
                rate = rate_by_rule(best[choice], second[choice], width)
                runs.append(self._run(texts, text, model, width, rate, seed))
        return list({run.name: run for run in runs}.values())

    def _run(
        self, texts: Texts, text: str, model: str, width: int, rate: float, seed: int
    ) -> ExperimentRun:
        training = at_rate(_training(model, width), rate)
        return _labelled(training.run(text, texts[text], seed), width)

    def notes(self, outcomes: Sequence[dict], output: AnyPath) -> list[str]:
        """Leads over the baseline by rung, and phi of each model on each text."""
        best = list(_at_best(outcomes))
        leads = [
            ["text, model", *(f"width {width}" for width in WIDTHS)],
            *_lead_lines(best),
        ]
        sizes = {each["run"]: _size(output / each["run"]) for each in best}
        lines = [["text, model", "phi"], *_phi_lines(best, sizes)]
        return [
            "Loss of the baseline less that of the model; of one seed where there is no error\n\n"
            + format_lines(leads),
            "The recurrence-equivalence exponent, with its standard error\n\n"
            + format_lines(lines),
        ]


def _labelled(run: ExperimentRun, width: int) -> ExperimentRun:
    labels = {**run.labels, "width": width, "rule": run.labels["learning_rate"]}
    return ExperimentRun(run.name, run.verb, run.arguments, labels, run.needs)


def rate_by_rule(first: float, second: float, width: int) -> float:
    """The learning rate at a width, from the best rates of the first two rungs.

    Beyond the second rung it falls with the power of the width that both suggest, but no faster
    than 1 / width, and it never grows: a grid of factors of 2 over a factor of 1.5 says little.

    Args:
      first: the best rate of the first rung.
      second: that of the second rung.
      width: the width.
    """
    if width == WIDTHS[0]:
        return first
    power = min(0.0, max(-1.0, log(second / first) / log(WIDTHS[1] / WIDTHS[0])))
    return float(f"{second * (width / WIDTHS[1]) ** power:.3g}")


def _at_best(outcomes: Sequence[dict]) -> Iterator[dict]:
    """The outcomes of each text, model and width at the rate with the most seeds, then the best."""
    groups: dict[tuple, dict[float, list[dict]]] = {}
    for each in outcomes:
        if "width" in each and "loss" in each:
            by_rate = groups.setdefault((each["text"], each["model"], each["width"]), {})
            by_rate.setdefault(each["learning_rate"], []).append(each)
    for by_rate in groups.values():
        yield from min(by_rate.values(), key=lambda x: (-len(x), mean(y["loss"] for y in x)))


def _lead_lines(outcomes: Sequence[dict]) -> Iterator[list[str]]:
    """For each text and model, the mean difference to the baseline and its error, by width."""
    losses = {(e["text"], e["model"], e["width"], e["seed"]): e["loss"] for e in outcomes}
    for text, model in dict.fromkeys((each["text"], each["model"]) for each in outcomes):
        if model == "baseline":
            continue
        cells = []
        for width in WIDTHS:
            leads = [
                losses[text, "baseline", width, seed] - loss
                for (t, m, w, seed), loss in losses.items()
                if (t, m, w) == (text, model, width) and (text, "baseline", w, seed) in losses
            ]
            value, error = mean_and_error(leads) if leads else (None, None)
            shown = "" if value is None else f"{value:.4f}"
            cells.append(shown if error is None else f"{shown} ± {error:.4f}")
        yield [f"{text}, {model}", *cells]


class Size(NamedTuple):
    """What the fit reads of a run: the kernels of a layer, the number of steps, and the tokens."""

    layer: float
    steps: int
    tokens: float


def _size(workdir: AnyPath) -> Size:
    facts = json.loads((workdir / "hyperparameters.json").read_text())
    tokens = facts["train.total_steps"] * facts["train.batch_size"] * facts["data.sequence_length"]
    return Size(12.0 * facts["model.embed_dim"] ** 2, facts["model.num_steps"], tokens)


def _phi_lines(outcomes: Sequence[dict], sizes: Mapping[str, Size]) -> Iterator[list[str]]:
    """phi of each text and model, from the mean losses over seeds."""
    losses: dict[tuple, list[dict]] = {}
    for each in outcomes:
        losses.setdefault((each["text"], each["model"], each["width"]), []).append(each)
    means = {
        key: (sizes[found[0]["run"]], mean(each["loss"] for each in found))
        for key, found in losses.items()
    }
    for text, model in dict.fromkeys(key[:2] for key in means):
        if model == "baseline":
            continue
        unique = [x for (t, m, _), x in means.items() if (t, m) == (text, "baseline")]
        shared = [x for (t, m, _), x in means.items() if (t, m) == (text, model)]
        yield [f"{text}, {model}", fit_phi(unique, shared)]


def fit_phi(unique: Sequence[tuple[Size, float]], shared: Sequence[tuple[Size, float]]) -> str:
    """phi with its standard error by the fit's curvature, or why there is none.

    The law is that of arXiv 2604.21106, L = E + A n^-a + B D^-b, with a = b: n is the kernels of N
    layers for the baseline, and of N^phi layers for the other; D is the tokens.

    Args:
      unique: size and loss of the baseline's runs.
      shared: those of the runs of a model whose steps share weights.
    """
    runs = [*unique, *shared]
    if len(runs) < _UNKNOWNS + 1 or min(len(unique), len(shared)) < 3:
        return "too few runs"
    layer, steps, tokens = np.array([size for size, _ in runs], float).T
    loss, is_shared = np.array([loss for _, loss in runs]), np.arange(len(runs)) >= len(unique)
    scale = float(np.max(layer * steps))

    def residuals(unknowns: np.ndarray) -> np.ndarray:
        e, log_a, log_b, power, phi = unknowns
        effective = layer * np.where(is_shared, steps**phi, steps) / scale
        data = tokens / tokens.max()
        return e + np.exp(log_a) * effective**-power + np.exp(log_b) * data**-power - loss

    low, high = [0, -10, -10, 0.01, -1], [loss.min(), 5, 5, 3, 2]
    fits = [
        least_squares(residuals, [0.8 * loss.min(), -1, -3, 0.3, start], bounds=(low, high))
        for start in _STARTS
    ]
    best = min(fits, key=lambda fit: fit.cost)
    phi = float(best.x[-1])
    if best.active_mask[-1] or not low[-1] + 0.01 < phi < high[-1] - 0.01:
        return f"beyond {phi:.0f}"
    variance = 2 * best.cost / (len(runs) - _UNKNOWNS)
    covariance = variance * np.linalg.pinv(best.jac.T @ best.jac)
    return f"{phi:.2f} ± {np.sqrt(covariance[-1, -1]):.2f}"
