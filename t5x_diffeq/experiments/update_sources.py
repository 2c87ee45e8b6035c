"""Where the changes of W(t) = W0 + P e(t) come from in the course of a training."""

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from t5x_diffeq.experiments.comparison import Comparison
from t5x_diffeq.experiments.present import Chart, Line, mean_and_error
from t5x_diffeq.runtime.files import AnyPath

PARTS = ("W0", "P", "e")
_CURVES = "curves.jsonl"
_BY, _ALL = "watch/update_by", "watch/update"


@dataclass(frozen=True, kw_only=True)
class UpdateSources(Comparison):
    """Trainings whose `train.watch_every` is set, and a figure of each model on each text.

    A line for each of W0, P and e: its share of the squared change of W(t) in an optimizer step,
    over all nodes and layers, the mean over seeds.
    """

    def charts(self, outcomes: Sequence[dict], output: AnyPath) -> dict[str, Chart]:
        """The figures."""
        of_models: dict[str, list[dict]] = defaultdict(list)
        for each in outcomes:
            if (output / each["run"] / _CURVES).exists():  # the workdir may be gone
                of_models[f"{each['text']}_{each['time_basis'].partition(':')[0]}"].append(each)
        return {name: _chart(runs, output) for name, runs in of_models.items()}


def _chart(runs: Sequence[dict], output: AnyPath) -> Chart:
    found = [shares(output / run["run"]) for run in runs]
    steps = [step for step in found[0] if all(step in of_run for of_run in found)]
    lines: dict[str, Line] = {
        part: [(step, *mean_and_error([of_run[step][part] for of_run in found])) for step in steps]
        for part in PARTS
    }
    return Chart("optimizer steps", "share of the change of W(t)", {"": lines})


def shares(workdir: AnyPath) -> dict[int, dict[str, float]]:
    """The share of each part in the change of all weights, by watched step that changes them.

    The share at a node of a layer is <part, D W> / |D W|^2; that of all is the mean of these,
    weighted by |D W|^2.
    """
    lines = map(json.loads, (workdir / _CURVES).read_text().splitlines())
    of_steps = {line["step"]: _shares_of_step(line) for line in lines}
    return {step: found for step, found in of_steps.items() if found}


def _shares_of_step(curves: dict[str, Any]) -> dict[str, float]:
    layers = [key.removeprefix(f"{_ALL}/") for key in curves if key.startswith(f"{_ALL}/")]
    squares = {layer: [x * x for x in curves[f"{_ALL}/{layer}"]] for layer in layers}
    whole = sum(map(sum, squares.values()))

    def share(part: str) -> float:
        of_layers = ((curves[f"{_BY}/{part}/{layer}"], squares[layer]) for layer in layers)
        return sum(s * x for by, of in of_layers for s, x in zip(by, of, strict=True)) / whole

    return {part: share(part) for part in PARTS} if whole else {}
