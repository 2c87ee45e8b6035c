"""A paired test of two models' answers to the questions of a task.

A hard question is hard for both models, so the difference of their answers varies less than the
answers do, and the test finds smaller differences than two standard errors of separate means.
"""

from collections.abc import Sequence
from math import erfc, sqrt
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from t5x_diffeq.system.errors import InputError
from t5x_diffeq.system.files import AnyPath, read_json_object
from t5x_diffeq.system.json_lines import check_types

_PAIRED_HEAD = (
    "Paired test over the same documents (and seeds), ODE against baseline\n\n"
    "| text, task, shots | ODE - baseline | standard error | p | seeds | documents |\n"
    "|---|---|---|---|---|---|"
)


class PairedDifference(NamedTuple):
    """The difference of two models' accuracies."""

    difference: float
    error: float
    p: float  # two-sided p-value by the normal approximation, so it takes hundreds of documents


def compare_pairs(
    a: Float[np.ndarray, "seeds documents"], b: Float[np.ndarray, "seeds documents"]
) -> PairedDifference:
    """The paired difference a - b, seed by seed and document by document.

    The variance over documents (of the mean over seeds) and, with several seeds, the variance over
    seeds (of the mean over documents) are added: the claim is about other documents and other
    seeds. The variance of a single seed and document is in both, so the sum is conservative.
    """
    d = a - b
    variance = sum(
        np.var(d.mean(axis), ddof=1) / d.shape[1 - axis] for axis in (0, 1) if d.shape[1 - axis] > 1
    )
    difference, error = float(d.mean()), sqrt(variance)
    p = erfc(abs(difference) / error / sqrt(2)) if error else float(difference == 0)
    return PairedDifference(difference, error, p)


def paired_table(outcomes: Sequence[dict], output: AnyPath) -> list[str]:
    """The table of paired tests, ODE against baseline, as one paragraph."""
    answers: dict[tuple, dict[tuple[str, int], list[float]]] = {}
    for outcome in outcomes:
        if "shots" in outcome and "task" not in outcome:
            for task, scores in _read_answers(output / outcome["run"]).items():
                named = [outcome[x] for x in ("text", "architecture") if x in outcome]
                by_model = answers.setdefault((*named, task, outcome["shots"]), {})
                by_model[outcome["model"], outcome["seed"]] = scores
    lines = []
    for row, by_model in answers.items():
        if seeds := sorted(s for m, s in by_model if m == "ode" and ("baseline", s) in by_model):
            ode = np.array([by_model["ode", seed] for seed in seeds], float)
            baseline = np.array([by_model["baseline", seed] for seed in seeds], float)
            test = compare_pairs(ode, baseline)
            lines.append(
                f"| {', '.join(map(str, row))} | {test.difference:+.4f} | {test.error:.4f} | "
                f"{test.p:.2g} | {len(seeds)} | {ode.shape[1]} |"
            )
    return ["\n".join([_PAIRED_HEAD, *lines])] if lines else []


def _read_answers(folder: AnyPath) -> dict[str, list[float]]:
    """Each task's accuracies by document, from the newest JSON of `evaluate`; {} if it has none.

    All subjects of MMLU are one task, as the paper counts them.
    """
    files = sorted(folder.glob("*.json"), key=lambda path: path.name.rpartition("-")[2])
    if not files:
        return {}
    try:
        documents = read_json_object(files[-1]).get("documents", {})
        check_types(documents, dict.fromkeys(documents, (list,)))
    except ValueError as error:
        raise InputError(
            f"{files[-1]} is damaged: {error}; delete it and its run's line in results.jsonl, and "
            "the same command evaluates again"
        ) from error
    tasks: dict[str, list[float]] = {}
    for task in sorted(documents):
        name = "mmlu" if task.startswith("mmlu_") else task
        tasks.setdefault(name, []).extend(documents[task])
    return tasks
