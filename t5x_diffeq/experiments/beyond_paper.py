"""Experiments that the paper doesn't have, at a laptop's size or the paper's."""

from collections.abc import Callable
from typing import Any

from t5x_diffeq.experiments.experiment import Experiment, Keys, Training
from t5x_diffeq.experiments.learning_rates import Sweep
from t5x_diffeq.experiments.present import TableSpec

_T, _N, _STEPS = "model.time_embed_dim", "model.num_steps", "train.total_steps"


def compare_budgets(config: str | None = None, seeds: int = 3) -> Experiment:
    """ODE against baseline at equal optimizer steps, equal time and equal parameters.

    The baseline, and four ODEs: the config's own, a narrower one, a narrower one whose depth grows
    during training, and one with as many parameters as the baseline: W0 and the T matrices of P
    have as many as N layers if T = N - 1. Trainings of several lengths have a full schedule each.
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
            Training(name.partition(",")[0], {**keys, _STEPS: multiply_steps(x)}, name, config)
            for name, factors, keys in contenders
            for x in factors
        ),
        tables=tuple(
            TableSpec(("text", "model"), "total_steps", x) for x in ("loss", "training_seconds")
        ),
        seeds=seeds,
    )


def sweep_controls(
    baseline: tuple[float, ...],
    ode: tuple[float, ...],
    config: str | None = None,
    seeds: int = 3,
) -> Sweep:
    """Where the ODE's lead over the per-layer baseline comes from: models between the two.

        frozen e        the baseline as W0 + P e_n with a free table e, which stays as it is
        constant e      the ODE with one W, W0 + P e, for all times
        table           the ODE with a free table e_n in place of sinusoids and their MLP
        frozen table    the same, which stays as it is

    Args:
      baseline: the learning rates to begin with for the variants of the baseline.
      ode: the same for those of the ODE.
      config: the config's file; None: the text's own for a laptop.
      seeds: the default of --seeds.
    """
    table: Keys = {"model.time_basis": lambda defaults: f"table:{defaults[_N]}"}
    frozen: Keys = {**table, "optimizer.role_multipliers": (("time_embedding", 0.0),)}
    models: dict[str, tuple[str, Keys]] = {
        "baseline": ("baseline", {}),
        "frozen e": ("baseline", {"model.weights": "time_dependent", **frozen}),
        "ode": ("ode", {}),
        "constant e": ("ode", {"model.time_basis": "legendre:1"}),
        "table": ("ode", table),
        "frozen table": ("ode", frozen),
    }
    rates = {"baseline": baseline, "ode": ode}
    return Sweep(
        trainings=tuple(
            Training(variant, keys, name, config, rates[variant])
            for name, (variant, keys) in models.items()
        ),
        seeds=seeds,
    )
