"""Where the ODE's lead over the per-layer baseline comes from: models between the two.

Each lacks one thing that the ODE has beside the baseline, or has one thing more than the baseline:

    shared squares      the baseline, whose layers share Adam's mean of squared gradients
    frozen e            the baseline as W0 + P e_n with a free table e, which stays as it is
    constant e          the ODE with one W, W0 + P e, for all times
    table               the ODE with a free table e_n in place of sinusoids and their MLP
    frozen table        the same, which stays as it is
"""

from t5x_diffeq.experiments.experiment import Keys
from t5x_diffeq.experiments.learning_rates import SweptModel

_SQUARES = {"optimizer.name": "t5x_diffeq.experiments.shared_squares:make"}
_TABLE = {"model.time_basis": "table:{num_steps}"}
_FROZEN = {"optimizer.role_multipliers": (("time_embedding", 0.0),)}
_GENERATED = {"model.weights": "time_dependent"}

CONTROLS: dict[str, tuple[str, Keys]] = {  # variant of the config, and keys
    "baseline": ("baseline", {}),
    "shared squares": ("baseline", _SQUARES),
    "frozen e": ("baseline", {**_GENERATED, **_TABLE, **_FROZEN}),
    "ode": ("ode", {}),
    "constant e": ("ode", {"model.time_basis": "legendre:1"}),
    "table": ("ode", _TABLE),
    "frozen table": ("ode", {**_TABLE, **_FROZEN}),
}


def controls(baseline: tuple[float, ...], ode: tuple[float, ...]) -> dict[str, SweptModel]:
    """The models of the sweep, by name.

    Args:
      baseline: the learning rates to begin with for those that are variants of the baseline.
      ode: the same for those of the ODE.
    """
    rates = {"baseline": baseline, "ode": ode}
    return {
        name: SweptModel(variant, rates[variant], keys)
        for name, (variant, keys) in CONTROLS.items()
    }
