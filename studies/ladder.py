"""A ladder of sizes: does the lead over the baseline grow, stay or shrink with compute?

Each rung is a width of configs/ladder.py. The first two sweep the learning rate of each model,
the second from where the first ended; further rungs follow from both. On these two rungs baselines
of other numbers of layers show how many unique layers a model is worth: phi, the
recurrence-equivalence exponent.

    python -m studies.ladder --text=stdlib [--seeds=3] [--part=0/2]
    timeout 8h python -m studies.ladder --text=stdlib

It begins with the smallest size. When it is stopped, it saves the run, and shows and writes the
tables of what is done; the same command continues.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import log

from studies.ladder_fits import BASELINE, RungRun, at_best_rate, format_notes
from studies.study import run_study
from t5x_diffeq.experiments.experiment import Group, Keys, Sweep, Texts, Trainee, at_rate
from t5x_diffeq.experiments.present import TableSpec
from t5x_diffeq.experiments.runs import ExperimentRun
from t5x_diffeq.system.files import AnyPath

WIDTHS = (32, 48, 64, 96, 144, 192, 384, 768)  # of configs/ladder.py
LAYERS = (1, 2, 3, 12)  # of further baselines
_CONFIG, _RATES = "ladder.py", (8e-3, 1.6e-2)
_SEEDED_RUNGS = 3  # rungs on which all seeds run

# By name: the variant, and the keys that it sets.
MODELS: dict[str, tuple[str, Keys]] = {
    **{variant: (variant, {}) for variant in ("baseline", "compact", "smooth", "ode", "shared")},
    # The baseline with the ODEs' scheme, which explains most of their lead (docs/lab/lead.md).
    "Euler baseline": ("baseline", {"model.scheme": "euler", "model.step_size": "1/N"}),
}
MODELS_OF_PHI: dict[str, tuple[str, Keys]] = {  # on the first two rungs, as BASELINES are
    "compact, T = 2": (
        "compact",
        {"model.time_embed_dim": 2, "model.attention_time_embed_dim": 2},
    ),
}
BASELINES: dict[str, tuple[str, Keys]] = {
    f"baseline, layers: {layers}": ("baseline", {"model.num_steps": layers}) for layers in LAYERS
}


def _training(model: str, width: int) -> Trainee:
    variant, keys = {**MODELS, **MODELS_OF_PHI, **BASELINES}[model]
    return Trainee(f"{variant}-{width}", keys, model, _CONFIG, _RATES)


def _sweep(width: int) -> Sweep:
    return Sweep(trainings=tuple(_training(model, width) for model in (*MODELS, *MODELS_OF_PHI)))


@dataclass(frozen=True, kw_only=True)
class Ladder(Sweep):
    """Trainings on each rung, from the smallest; tables show the rungs that are done."""

    tables: tuple[TableSpec, ...] = (
        TableSpec(("text", "model"), "width", "loss", "learning_rate", log=True),
    )

    def runs(
        self, texts: Texts, seeds: Sequence[int], done: dict[str, dict]
    ) -> list[ExperimentRun]:
        """The runs that the outcomes so far determine, rung by rung."""
        runs, first = _sweep(WIDTHS[0]).progress(texts, seeds, done)
        runs = [_labelled(run, WIDTHS[0]) for run in runs]
        if not first:
            return runs
        runs += self._baselines(texts, seeds, WIDTHS[0], first)
        again, second = _sweep(WIDTHS[1]).progress(
            texts, seeds, done, {group: (rate / 2, rate) for group, rate in first.items()}
        )
        runs += [_labelled(run, WIDTHS[1]) for run in again]
        if not second:
            return runs
        runs += self._baselines(texts, seeds, WIDTHS[1], second)
        for width in WIDTHS[2:]:
            rung_seeds = seeds if WIDTHS.index(width) < _SEEDED_RUNGS else seeds[:1]
            runs += [
                self._run(texts, *group, width, rate_by_rule(first[group], rate, width), seed)
                for seed in rung_seeds
                for group, rate in second.items()
                if group[1] in MODELS
            ]
        return runs

    def _baselines(
        self, texts: Texts, seeds: Sequence[int], width: int, best: dict[Group, float]
    ) -> list[ExperimentRun]:
        """Baselines of other numbers of layers, at the baseline's best rate."""
        return [
            self._run(texts, text, model, width, best[text, BASELINE], seed)
            for seed in seeds
            for text in texts
            for model in BASELINES
        ]

    def _run(
        self, texts: Texts, text: str, model: str, width: int, rate: float, seed: int
    ) -> ExperimentRun:
        training = at_rate(_training(model, width), rate)
        return _labelled(training.run(text, texts[text], seed), width)

    def notes(self, outcomes: Sequence[dict], output: AnyPath) -> list[str]:
        """Leads over the baseline, fits, and phi, on each text."""
        runs = [_read_run(each, output) for each in at_best_rate(outcomes)]
        return format_notes(runs)


def _labelled(run: ExperimentRun, width: int) -> ExperimentRun:
    return ExperimentRun(run.name, run.verb, run.arguments, {**run.labels, "width": width})


def rate_by_rule(first: float, second: float, width: int) -> float:
    """The learning rate at a width beyond the second rung, from the best rates of the first two.

    It falls with the power of the width that both rates suggest, but no faster than 1 / width, and
    it never grows: rates on a grid of factors of 2 say little about a factor of 1.5 in width.

    Args:
      first: the best rate of the first rung.
      second: the best rate of the second rung.
      width: the width.
    """
    power = min(0.0, max(-1.0, log(second / first) / log(WIDTHS[1] / WIDTHS[0])))
    return float(f"{second * (width / WIDTHS[1]) ** power:.3g}")


def _read_run(outcome: dict, output: AnyPath) -> RungRun:
    workdir = output / outcome["run"]
    keys = json.loads((workdir / "hyperparameters.json").read_text("utf-8"))
    total = (workdir / "parameters.txt").read_text("utf-8").rpartition("Total: ")[2].split()[0]
    tokens = keys["train.total_steps"] * keys["train.batch_size"] * keys["data.sequence_length"]
    return RungRun(
        text=outcome["text"],
        model=outcome["model"],
        width=outcome["width"],
        seed=outcome["seed"],
        loss=outcome["loss"],
        steps=keys["model.num_steps"],
        tokens=tokens,
        parameters=int(total.replace(",", "")),
    )


LAPTOP = PAPER = Ladder()

if __name__ == "__main__":
    run_study("ladder", __doc__, LAPTOP, PAPER)
