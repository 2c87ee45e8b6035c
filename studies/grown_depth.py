"""Grown depth at equal FLOPs: does W(t) grow better than a stack of layers?

    python -m studies.grown_depth --text=stdlib

Growing from one layer saves compute at equal loss (arXiv 2511.04981). Here a model of 12 steps has
one step for 0.7 of its training. So for the same FLOPs it takes 2.8 times the optimizer steps of a
model that is not grown. The control is a stack of 12 layers, of which a model of one step reads
only the last (`examples.depth.nested_layers`): if W(t) is not ahead of the control, its lead over
GPT comes from growing.
"""

from studies.study import Models, run_study, sweep_of_widths
from t5x_diffeq.experiments.experiment import Keys

_N, _UNTIL, _STEPS = 12, 0.7, "train.total_steps"
_TIMES = 1 / (_UNTIL / _N + (1 - _UNTIL))  # the optimizer steps that a grown model may take
_EVERY: Keys = {
    "optimizer.schedule": "wsd",
    "optimizer.role_multipliers": (),  # e(t) stays as it was initialised
    "model.num_steps": _N,
    "train.velocity_penalty": 0.0,
}
_GROWN: Keys = {
    "train.depths": (1,),
    "train.depths_until": _UNTIL,
    _STEPS: lambda values: round(_TIMES * values[_STEPS]),
}
_NESTED: Keys = {"model.weights": f"examples.depth.nested_layers:NestedLayers(layers={_N})"}
_MODELS: Models = {
    "ode, grown": ("ode", _GROWN),
    "smooth, grown": ("smooth", _GROWN),
    "nested layers, grown": ("euler", {**_NESTED, **_GROWN}),
    "GPT": ("baseline", {}),
    "GPT, Euler's scheme": ("euler", {}),
}
LAPTOP = PAPER = sweep_of_widths(lambda width: _MODELS, _EVERY)

if __name__ == "__main__":
    run_study("grown_depth", __doc__, LAPTOP, PAPER)
