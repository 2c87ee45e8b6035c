"""What a ladder of sizes shows: leads, how they change with compute, and phi.

phi, the recurrence-equivalence exponent, says that N steps which share weights are worth N^phi
unique layers. Two ways lead to it: the number of layers at which a baseline of the same width and
tokens has the model's loss; and the law of arXiv 2604.21106, fitted to all runs.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import inf, log
from statistics import mean
from typing import NamedTuple

import numpy as np
from scipy.optimize import least_squares

from t5x_diffeq.experiments.present import format_lines, mean_and_error

BASELINE = "baseline"
_STARTS = (0.2, 0.5, 0.8)  # of phi, from which the fit begins
_UNKNOWNS = 5  # of the fit


class RungRun(NamedTuple):
    """A training of the ladder.

    Attributes:
      text: the text's name.
      model: the model's name; "baseline, layers: 3" has another number of layers than its rung.
      width: the width of its rung.
      seed: its seed.
      loss: nats per token at the end.
      steps: number of steps or layers.
      tokens: number of tokens that it was trained on.
      parameters: number of all parameters.
    """

    text: str
    model: str
    width: int
    seed: int
    loss: float
    steps: int
    tokens: int
    parameters: int

    @property
    def layer(self) -> int:
        """Number of parameters in the kernels of one layer."""
        return 12 * self.width**2

    @property
    def flops(self) -> float:
        """FLOPs of the training in kernels, without embeddings and attention's products."""
        return 6.0 * self.layer * self.steps * self.tokens


def at_best_rate(outcomes: Sequence[dict]) -> Iterator[dict]:
    """The outcomes of each text, model and width at the best of the rates with the most seeds."""
    groups: dict[tuple, dict[float, list[dict]]] = {}
    for each in outcomes:
        if "width" in each and "loss" in each:
            by_rate = groups.setdefault((each["text"], each["model"], each["width"]), {})
            by_rate.setdefault(each["learning_rate"], []).append(each)
    for by_rate in groups.values():
        yield from min(by_rate.values(), key=lambda x: (-len(x), mean(y["loss"] for y in x)))


def format_notes(runs: Sequence[RungRun]) -> list[str]:
    """Tables of leads, fits and phi, as paragraphs in Markdown."""
    widths = sorted({run.width for run in runs})
    pairs = dict.fromkeys((run.text, run.model) for run in runs if not _is_baseline(run))

    def by_width(value: Callable[[Sequence[RungRun], RungRun], float | None]) -> str:
        lines = [["text, model", *(f"width {width}" for width in widths)]]
        for text, model in pairs:
            cells = []
            for width in widths:
                rung = [run for run in runs if (run.text, run.width) == (text, width)]
                values = [value(rung, run) for run in rung if run.model == model]
                cells.append(_cell([x for x in values if x is not None]))
            lines.append([f"{text}, {model}", *cells])
        return format_lines(lines)

    return [
        "Loss of the baseline less that of the model, at equal tokens and nearly equal FLOPs; of "
        f"one seed where there is no error\n\n{by_width(lead)}",
        "The same against a baseline of as many parameters: between baselines of several numbers "
        f"of layers, the loss is linear in the logarithm\n\n{by_width(lead_at_equal_parameters)}",
        "phi by the number of unique layers with the same loss, which N steps are worth: N^phi. "
        "In brackets, with how many seeds all baselines are worse, or all better"
        f"\n\n{by_width(phi_by_layers)}",
        f"phi by the law, of all runs\n\n{format_lines([*_phi_lines(runs)])}",
        "Slopes over the rungs with their standard errors: of log loss per factor e of FLOPs in "
        "kernels and of parameters, and of the lead per factor of ten of FLOPs\n\n"
        + format_lines([*_slope_lines(runs)]),
    ]


def _is_baseline(run: RungRun) -> bool:
    return run.model.startswith(BASELINE)


def _cell(values: list[float]) -> str:
    if not values:
        return ""
    for beyond, name in ((inf, "more than any"), (-inf, "less than any")):
        if count := values.count(beyond):
            return f"{name} ({count} of {len(values)})"
    value, error = mean_and_error(values)
    return f"{value:.3f}" if error is None else f"{value:.3f} ± {error:.3f}"


def _baselines(rung: Sequence[RungRun], seed: int) -> list[RungRun]:
    """The baselines of a rung and seed, in order of their layers."""
    runs = [run for run in rung if _is_baseline(run) and run.seed == seed]
    return sorted(runs, key=lambda run: run.steps)


def lead(rung: Sequence[RungRun], run: RungRun) -> float | None:
    """The loss of the baseline with as many layers and the same seed, less the run's loss."""
    same = [each for each in _baselines(rung, run.seed) if each.steps == run.steps]
    return same[0].loss - run.loss if same else None


def lead_at_equal_parameters(rung: Sequence[RungRun], run: RungRun) -> float | None:
    """The lead over a baseline of as many parameters; None outside the baselines' range."""
    baselines = _baselines(rung, run.seed)
    sizes = [each.parameters for each in baselines]
    if len(sizes) < 2 or not sizes[0] <= run.parameters <= sizes[-1]:
        return None
    losses = [each.loss for each in baselines]
    return float(np.interp(log(run.parameters), np.log(sizes), losses)) - run.loss


def phi_by_layers(rung: Sequence[RungRun], run: RungRun) -> float | None:
    """phi by the smallest number of unique layers that has the run's loss, of the same seed.

    Returns:
      log(layers) / log(N), the loss being linear in log(layers) between two baselines; infinite if
      no baseline is as good, minus infinity if all are better; None with fewer than two baselines.
    """
    baselines = _baselines(rung, run.seed)
    if len(baselines) < 2:
        return None
    if run.loss > baselines[0].loss:
        return -inf
    for few, many in itertools.pairwise(baselines):
        if many.loss <= run.loss:
            part = (few.loss - run.loss) / (few.loss - many.loss)
            layers = log(few.steps) + part * log(many.steps / few.steps)
            return layers / log(run.steps)
    return inf


def _phi_lines(runs: Sequence[RungRun]) -> Iterator[list[str]]:
    yield ["text, model", "phi"]
    means = _means(runs)
    for text, model in dict.fromkeys((run.text, run.model) for run in means):
        shared = [run for run in means if (run.text, run.model) == (text, model)]
        if not _is_baseline(shared[0]):
            unique = [run for run in means if run.text == text and _is_baseline(run)]
            yield [f"{text}, {model}", fit_phi(unique, shared)]


def _means(runs: Sequence[RungRun]) -> list[RungRun]:
    """One run for all seeds of a text, model and width, with their mean loss."""
    groups: dict[tuple, list[RungRun]] = {}
    for run in runs:
        groups.setdefault((run.text, run.model, run.width), []).append(run)
    return [x[0]._replace(loss=mean(run.loss for run in x)) for x in groups.values()]


def fit_phi(unique: Sequence[RungRun], shared: Sequence[RungRun]) -> str:
    """phi with its standard error by the fit's curvature, or why there is none.

    The law of arXiv 2604.21106 is L = E + A n^-a + B D^-b, here with a = b: n is the kernels of N
    layers for the baseline, and of N^phi layers for the other model; D is the tokens. If all runs
    had the same tokens per parameter, A and B could not be told apart, so some baselines must have
    other tokens per parameter.

    Args:
      unique: baselines.
      shared: runs of a model whose steps share weights.
    """
    runs = [*unique, *shared]
    if len(runs) < _UNKNOWNS + 1 or min(len(unique), len(shared)) < 2:
        return "too few runs"
    if len({round(run.tokens / (run.layer * run.steps), 1) for run in unique}) < 2:
        return "all baselines have the same tokens per parameter"
    columns = [(run.layer, run.steps, run.tokens, run.loss) for run in runs]
    layer, steps, tokens, loss = np.array(columns, float).T
    is_shared = np.arange(len(runs)) >= len(unique)
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


def slope(x: Sequence[float], y: Sequence[float]) -> tuple[float, float] | None:
    """The slope of y over x by least squares, and its standard error; None for too few points."""
    if len(x) < 3 or len(set(x)) < 2:
        return None
    (value, constant), error = np.polyfit(x, y, 1), np.asarray(x) - np.mean(x)
    rest = np.asarray(y) - value * np.asarray(x) - constant
    return float(value), float(np.sqrt(rest @ rest / (len(x) - 2) / (error @ error)))


def _slope_lines(runs: Sequence[RungRun]) -> Iterator[list[str]]:
    yield ["text, model", "log loss, FLOPs", "log loss, parameters", "lead, FLOPs"]
    for text, model in dict.fromkeys((run.text, run.model) for run in runs):
        chosen = [run for run in runs if (run.text, run.model) == (text, model)]
        if model != BASELINE and _is_baseline(chosen[0]):
            continue
        rungs: Mapping[int, list[RungRun]] = {
            run.width: [x for x in runs if (x.text, x.width) == (text, run.width)] for run in chosen
        }
        leads = [(run, lead(rungs[run.width], run)) for run in chosen]
        losses = [log(run.loss) for run in chosen]
        fits = [
            slope([log(run.flops) for run in chosen], losses),
            slope([log(run.parameters) for run in chosen], losses),
            slope(
                [log(run.flops) / log(10) for run, ahead in leads if ahead is not None],
                [ahead for _, ahead in leads if ahead is not None],
            ),
        ]
        if model == BASELINE:
            fits[-1] = None
        yield [
            f"{text}, {model}",
            *("" if fit is None else f"{fit[0]:.4f} ± {fit[1]:.4f}" for fit in fits),
        ]
