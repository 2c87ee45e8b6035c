"""A paired test over the documents of a task: two models answer the same questions.

A hard question is hard for both models, so the difference of their answers varies less than the
answers do, and the test finds smaller differences than two standard errors of separate means.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import erfc, sqrt

import numpy as np
from jaxtyping import Float

_HEAD = "| text, task, shots | ODE - baseline | standard error | p | seeds | documents |"


@dataclass(frozen=True)
class PairedDifference:
    """The difference of two models' accuracies.

    Attributes:
      difference: difference of the means over documents and seeds.
      error: its standard error.
      p: two-sided p-value by the normal approximation, so it takes hundreds of documents.
    """

    difference: float
    error: float
    p: float


def compare_pairs(
    a: Float[np.ndarray, "seeds documents"], b: Float[np.ndarray, "seeds documents"]
) -> PairedDifference:
    """The paired difference a - b, seed by seed and document by document.

    The variance over documents (of the mean over seeds) and, with several seeds, the variance over
    seeds (of the mean over documents) are added: the claim is about other documents and other
    seeds. The sum counts the part of a single seed and document twice, so it is conservative.
    """
    d = a - b
    variance = sum(
        np.var(d.mean(axis), ddof=1) / d.shape[1 - axis] for axis in (0, 1) if d.shape[1 - axis] > 1
    )
    difference, error = float(d.mean()), sqrt(variance)
    p = erfc(abs(difference) / error / sqrt(2)) if error else float(difference == 0)
    return PairedDifference(difference, error, p)


def paired_table(answers: Sequence[dict]) -> str:
    """The table of paired tests, ODE against baseline.

    Args:
      answers: outcomes with the labels `text`, `shots`, `model`, `seed`, and `documents`: each
        task's accuracies by document.
    """
    found: dict[tuple, dict[str, dict[int, list[float]]]] = {}
    for answer in answers:
        for task, scores in _whole_tasks(answer["documents"]).items():
            by_model = found.setdefault((answer["text"], task, answer["shots"]), {})
            by_model.setdefault(answer["model"], {})[answer["seed"]] = scores
    lines = [_HEAD, "|---" * 6 + "|"]
    for row, of in found.items():
        seeds = sorted(of.get("ode", {}).keys() & of.get("baseline", {}).keys())
        if seeds:
            ode, baseline = (
                np.array([of[m][s] for s in seeds], float) for m in ("ode", "baseline")
            )
            test = compare_pairs(ode, baseline)
            lines.append(
                f"| {', '.join(map(str, row))} | {test.difference:+.4f} | {test.error:.4f} | "
                f"{test.p:.2g} | {len(seeds)} | {ode.shape[1]} |"
            )
    title = "Paired test over the same documents (and seeds), ODE against baseline"
    return f"{title}\n\n" + "\n".join(lines)


def _whole_tasks(documents: dict[str, list[float]]) -> dict[str, list[float]]:
    """Tasks as the paper counts them: all subjects of MMLU are one task."""
    whole: dict[str, list[float]] = {}
    for task in sorted(documents):
        name = "mmlu" if task.startswith("mmlu_") else task
        whole.setdefault(name, []).extend(documents[task])
    return whole
