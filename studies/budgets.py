"""ODE against baseline at equal optimizer steps, equal time and equal parameters.

    python -m studies.budgets --text=shakespeare=tinyshakespeare.txt
    python -m studies.budgets --scale=paper --text=openwebtext=stream:Skylion007/openwebtext

The times are comparable only if no other work runs meanwhile.
"""

from collections.abc import Callable
from typing import Any

from studies.study import run_study
from t5x_diffeq.experiments.experiment import Experiment, Keys, Trainee
from t5x_diffeq.experiments.present import TableSpec

_T, _N, _STEPS = "model.time_embed_dim", "model.num_steps", "train.total_steps"


def compare_budgets(config: str | None = None, seeds: int = 3) -> Experiment:
    """The baseline, and four ODEs, after several numbers of steps.

    The ODEs are the config's own, a narrower one, a narrower one whose depth grows during training,
    and one with as many parameters as the baseline: W0 and the T matrices of P have as many
    parameters as N layers if T = N - 1. A training of any length has a full schedule.
    """

    def multiply_steps(factor: float) -> Callable[[Keys], Any]:
        return lambda defaults: round(factor * defaults[_STEPS])

    narrow: Keys = {_T: lambda defaults: defaults[_T] // 3}
    growing: Keys = {
        "train.depths": lambda defaults: (defaults[_N] // 2,),
        "train.depths_until": 0.5,
    }
    equal: Keys = {_T: lambda defaults: defaults[_N] - 1}
    contenders: list[tuple[str, tuple[float, ...], Keys]] = [
        ("baseline", (1, 1.25), {}),
        ("ode", (1,), {}),
        ("ode, T / 3", (0.8, 1), narrow),
        ("ode, T / 3, growing", (1,), {**narrow, **growing}),
        ("ode, equal parameters", (1,), equal),
    ]
    return Experiment(
        trainings=tuple(
            Trainee(name.partition(",")[0], {**keys, _STEPS: multiply_steps(x)}, name, config)
            for name, factors, keys in contenders
            for x in factors
        ),
        tables=tuple(
            TableSpec(("text", "model"), "total_steps", x) for x in ("loss", "training_seconds")
        ),
        seeds=seeds,
    )


LAPTOP, PAPER = compare_budgets(), compare_budgets("gpt_small.py", seeds=1)

if __name__ == "__main__":
    run_study("budgets", __doc__, LAPTOP, PAPER)
