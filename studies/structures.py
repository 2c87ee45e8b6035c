"""Structures of depth beside GPT and W(t): at equal FLOPs, equal parameters and equal time.

    python -m studies.structures --text=stdlib

Each structure of `examples/depth/`, GPT, GPT with Euler's scheme, and `:ode` are trained with Muon
at widths 32 and 48, with weight decay 0.1 for all. First a step of each is measured: the FLOPs of
its products, its parameters, and its time, in turns with GPT's; meanwhile no other work should run.
Then there are three budgets:

- equal FLOPs: as many optimizer steps as GPT's FLOPs pay for, at the best rate of a sweep;
- equal parameters: structures with another number of parameters than GPT take a size with GPT's
  number, with GPT's FLOPs and a sweep of their own;
- equal time: as many optimizer steps as GPT's time pays for, at the best rate at equal FLOPs.

A training has a full schedule of its length, which is half of the length in `configs/ladder.py`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean
from typing import Any, NamedTuple

from studies.ladder_fits import at_best_rate
from studies.study import run_study
from t5x_diffeq.config.config_files import values_of
from t5x_diffeq.experiments.experiment import Keys, Sweep, Texts, Trainee, at_rate
from t5x_diffeq.experiments.present import TableSpec, format_lines, mean_and_error
from t5x_diffeq.experiments.runs import ExperimentRun, format_flags
from t5x_diffeq.system.files import AnyPath

WIDTHS = (32, 48)
BUDGETS = ("equal FLOPs", "equal parameters", "equal time")
_CONFIG, _RATES, _STEPS = "ladder.py", (1.6e-2, 3.2e-2), "train.total_steps"
_N, _DEPTHS = 6, (2, 3, 6)
_EVERY: Keys = {
    "optimizer.name": "muon",
    "optimizer.weight_decay": 0.1,
    "train.velocity_penalty": 0.0,
}
_SOURCE, _SCHEME, _T = "model.weights", "model.scheme", "model.time_embed_dim"


class Structure(NamedTuple):
    """A structure of depth, and how it gets GPT's number of parameters, if it has another."""

    variant: str
    keys: Keys
    with_parameters_of_gpt: Keys | None = None


def _example(name: str) -> str:
    return f"examples.depth.{name}"


def structures(width: int) -> dict[str, Structure]:
    """All structures at a width, by their names in tables."""
    ends, recursion = _example("own_ends:OwnEnds"), _example("relaxed_recursion:RelaxedRecursion")
    injected = {_SCHEME: _example("loop:injected")}
    two_steps = {_SCHEME: _example("adams_bashforth:adams_bashforth")}
    # Six layers, of which four are read twice.
    two_loops: Keys = {_SOURCE: f"{ends}(middle=4)", "model.num_steps": 10}
    # A layer has 12 width^2 parameters in its kernels, and low-rank changes of them 18 width rank.
    rank = round(4 * 12 * width**2 / (_N * 18 * width))
    return {
        "GPT": Structure("baseline", {}),
        "GPT, Euler's scheme": Structure("euler", {}),
        "W(t)": Structure("ode", {}, {_T: _N - 1}),
        "W(t), state-space": Structure(
            "ode", {"model.time_basis": _example("state_space:StateSpace(8)")}, {_T: _N - 1}
        ),
        "loop": Structure(
            "baseline",
            {_SOURCE: "shared", **injected},
            # The matrix of the injection is a twelfth of a layer, by which the MLP is narrower.
            {**two_loops, **injected, "model.mlp_dim": 7 * width // 2},
        ),
        "relaxed recursion": Structure(
            "baseline", {_SOURCE: recursion}, {_SOURCE: f"{recursion}(rank={rank})"}
        ),
        "own ends": Structure("baseline", {_SOURCE: ends}, two_loops),
        "nested layers": Structure(
            "euler",
            {
                _SOURCE: _example(f"nested_layers:NestedLayers(layers={_N})"),
                "train.depths": _DEPTHS,
            },
        ),
        **{
            name: Structure("baseline", {_SCHEME: _example(scheme)})
            for name, scheme in {
                "U-net skips": "unet_skips:skips",
                "averages over depth": "averages_over_depth:averages",
                "attention residuals": "attention_residuals:attention_residuals",
                "hyper-connections": "hyper_connections:hyper_connections",
                "constrained hyper-connections": (
                    "hyper_connections:hyper_connections(constrained=True)"
                ),
            }.items()
        },
        "momentum": Structure("euler", {_SCHEME: _example("momentum:momentum")}),
        "Adams-Bashforth": Structure("euler", two_steps),
    }


class Costs(NamedTuple):
    """What an optimizer step of a structure costs, over GPT's of the same width."""

    parameters: float
    flops: float  # of the products of the forward and the backward pass
    time: float


@dataclass(frozen=True, kw_only=True)
class Structures(Sweep):
    """The measurements, and the trainings with each budget; the smaller width comes first."""

    tables: tuple[TableSpec, ...] = ()

    def runs(
        self, texts: Texts, seeds: Sequence[int], done: dict[str, dict]
    ) -> list[ExperimentRun]:
        """The runs that the outcomes so far determine."""
        runs: list[ExperimentRun] = []
        starts: dict[str, Sequence[float]] = {}  # the rates with which a structure's sweep begins
        for width in WIDTHS:
            measurements = list(_measurements(width).values())
            runs += measurements
            if any(each.name not in done for each in measurements):
                return runs
            costs = read_costs(width, done)
            best: dict[str, float] = {}
            for budget in BUDGETS[:2]:
                trainings = _trainings(width, budget, costs)
                swept, rates = Sweep(trainings=tuple(trainings.values())).progress(
                    texts,
                    seeds,
                    done,
                    {
                        (text, each): starts.get(each, _RATES)
                        for text in texts
                        for each in trainings
                    },
                )
                runs += _labelled(swept, width, budget)
                if not rates:
                    return runs
                best |= {name: rate for (_, name), rate in rates.items() if name not in best}
            runs += [
                run
                for seed in seeds
                for text, keys in texts.items()
                for name, each in _trainings(width, BUDGETS[2], costs).items()
                for run in _labelled(
                    [at_rate(each, best[name]).run(text, keys, seed)], width, BUDGETS[2]
                )
            ]
            if any(run.name not in done for run in runs):
                return runs
            starts = {name: (rate / 2, rate) for name, rate in best.items()}
        return runs

    def notes(self, outcomes: Sequence[dict], output: AnyPath) -> list[str]:
        """A table for each text and width, of all runs that count."""
        done = {each["run"]: each for each in outcomes}
        texts = dict.fromkeys(each["text"] for each in outcomes if "text" in each)
        return [
            f"{text}, width {width}\n\n{_table(chosen, read_costs(width, done))}"
            for text in texts
            for width in WIDTHS
            if (chosen := [x for x in outcomes if (x.get("text"), x.get("width")) == (text, width)])
        ]


def _measurements(width: int) -> dict[tuple[str, str], ExperimentRun]:
    """By structure and budget, the benchmarks of its step against GPT's."""
    return {
        (name, budget): ExperimentRun(
            f"structures-{width}-{name}-{budget}".replace(" ", "_").replace("'", ""),
            "benchmark",
            (
                f"--config=configs/{_CONFIG}:{each.variant}-{width}",
                "--rounds=30",
                *format_flags({**_EVERY, **keys}),
            ),
        )
        for name, each in structures(width).items()
        for budget, keys in _keys_by_budget(each).items()
    }


def _keys_by_budget(each: Structure) -> dict[str, Keys]:
    """The keys at equal FLOPs and, if the structure then has another size, at equal parameters."""
    keys = {k: v for k, v in each.keys.items() if k != "train.depths"}
    equal = each.with_parameters_of_gpt
    return {BUDGETS[0]: keys, **({} if equal is None else {BUDGETS[1]: {**keys, **equal}})}


def read_costs(width: int, done: Mapping[str, Mapping[str, Any]]) -> dict[tuple[str, str], Costs]:
    """The costs of a width's structures, by structure and budget, from its measurements.

    FLOPs come from the step with Adam, whose update has no products, so only the gradient counts.
    """
    measured = {key: done[run.name] for key, run in _measurements(width).items()}
    gpt = measured["GPT", BUDGETS[0]]
    return {
        key: Costs(
            each["model: parameters"] / gpt["model: parameters"],
            each["adam: flops"] / gpt["adam: flops"],
            each["model / baseline: step_ms"],
        )
        for key, each in measured.items()
    }


def _trainings(
    width: int, budget: str, costs: Mapping[tuple[str, str], Costs]
) -> dict[str, Trainee]:
    """The trainings with a budget, by structure; a multiple of 10 optimizer steps."""
    steps = values_of(_CONFIG, f"baseline-{width}")[_STEPS] / 2
    trainings = {}
    for name, each in structures(width).items():
        size = BUDGETS[1] if budget == BUDGETS[1] else BUDGETS[0]
        if (name, size) in costs:
            cost = costs[name, size]
            factor = cost.time if budget == BUDGETS[2] else cost.flops
            # A step on one of several grids costs as much as their mean.
            factor *= mean(each.keys.get("train.depths", (_N,))) / _N
            keys = {**_EVERY, **each.keys, **_keys_by_budget(each)[size]}
            keys[_STEPS] = 10 * round(steps / factor / 10)
            trainings[name] = Trainee(f"{each.variant}-{width}", keys, name, _CONFIG)
    return trainings


def _labelled(runs: Sequence[ExperimentRun], width: int, budget: str) -> list[ExperimentRun]:
    return [replace(run, labels={**run.labels, "width": width, "budget": budget}) for run in runs]


def _table(outcomes: Sequence[dict], costs: Mapping[tuple[str, str], Costs]) -> str:
    """The means over seeds and, in brackets, how far they are ahead of GPT, paired by seed."""
    losses: dict[tuple[str, str], dict[int, float]] = {}
    for budget in BUDGETS:
        for each in at_best_rate([x for x in outcomes if x["budget"] == budget]):
            losses.setdefault((each["model"], budget), {})[each["seed"]] = each["loss"]

    def cell(name: str, budget: str) -> str:
        # A structure with GPT's parameters needs no other size for them.
        key = (name, budget) if (name, BUDGETS[1]) in costs or budget != BUDGETS[1] else None
        by_seed = losses.get(key or (name, BUDGETS[0]), {})
        if not by_seed:
            return ""
        text = _format(list(by_seed.values()))
        gpt = losses["GPT", BUDGETS[0]]
        ahead = [gpt[seed] - loss for seed, loss in by_seed.items() if seed in gpt]
        return text if name == "GPT" or not ahead else f"{text} ({_format(ahead)})"

    lines = [["structure", "parameters", "FLOPs", "time", *BUDGETS]]
    for (name, budget), cost in costs.items():
        if budget == BUDGETS[0]:
            ratios = [f"{each:.2f}" for each in cost]
            lines.append([name, *ratios, *(cell(name, each) for each in BUDGETS)])
    return format_lines(lines)


def _format(values: Sequence[float]) -> str:
    value, error = mean_and_error(values)
    return f"{value:.4f}" if error is None else f"{value:.4f} ± {error:.4f}"


LAPTOP = PAPER = Structures()

if __name__ == "__main__":
    run_study("structures", __doc__, LAPTOP, PAPER)
