"""Grown depth at equal FLOPs: does W(t) grow better than a stack of layers?

    python -m studies.grown_depth --text=stdlib

Growing from one layer saves compute at equal loss (arXiv 2511.04981). Here a model of 12 steps has
one step for 0.7 of its training. So for the same FLOPs it takes 2.8 times the optimizer steps of a
model that is not grown. There are two grown stacks of 12 layers as controls. Of nested layers, a
model of one step reads only the last (`examples.depth.nested_layers`), so the others are untrained
when depth grows. Copied layers begin as copies of the one layer that was trained
(`examples.depth.copied_layers`). If W(t) is not ahead of both, its lead over GPT comes from
growing. And GPTs of 4, 2 and 1 layers take the FLOPs of twelve layers for more optimizer steps: if
one of them is ahead, twelve layers are too many for this budget. So W(t) and copied layers grow to
four steps, too.
"""

from studies.study import Model, Models, run_study, sweeps_at_two_scales
from t5x_diffeq.experiments.experiment import Keys

_N, _UNTIL = 12, 0.7
_TIMES = 1 / (_UNTIL / _N + (1 - _UNTIL))  # the optimizer steps that a grown model may take
# The optimizer steps of a GPT with fewer layers, over those of 12 layers with the same FLOPs. At
# width 32 the head takes as many as 0.67 layers.
_SHALLOW = {4: 2.7, 2: 4.7, 1: 7.5}
_EVERY: Keys = {
    "optimizer.schedule": "wsd",
    "optimizer.role_multipliers": (),  # e(t) stays as it was initialised
    "model.num_steps": _N,
}
_GROWN: Keys = {"train.depths": (1,), "train.depths_until": _UNTIL}
_TO_4: Keys = {**_GROWN, "model.num_steps": 4}
_TIMES_TO_4 = 4.9  # likewise, with 0.67 layers for the head
_NESTED: Keys = {"model.weights": f"examples.depth.nested_layers:NestedLayers(layers={_N})"}


def _copied(layers: int) -> Keys:
    return {"model.weights": f"examples.depth.copied_layers:CopiedLayers(layers={layers})"}


_MODELS: Models = {
    "ode, grown": Model("ode", _GROWN, _TIMES),
    # W0 and N matrices P, as many kernels as copied layers have
    "ode, as many parameters, grown": Model("ode", {**_GROWN, "model.time_embed_dim": _N}, _TIMES),
    "smooth, grown": Model("smooth", _GROWN, _TIMES),
    "nested layers, grown": Model("euler", {**_NESTED, **_GROWN}, _TIMES),
    "copied layers, grown": Model("euler", {**_copied(_N), **_GROWN}, _TIMES),
    "ode, grown to N = 4": Model("ode", _TO_4, _TIMES_TO_4),
    "copied layers, grown to N = 4": Model("euler", {**_copied(4), **_TO_4}, _TIMES_TO_4),
    "GPT": Model("baseline"),
    "GPT, Euler's scheme": Model("euler"),
    **{
        f"GPT, Euler's scheme, N = {layers}": Model("euler", {"model.num_steps": layers}, times)
        for layers, times in _SHALLOW.items()
    },
}
LAPTOP, PAPER = sweeps_at_two_scales(lambda width: _MODELS, _EVERY)

if __name__ == "__main__":
    run_study("grown_depth", __doc__, LAPTOP, PAPER)
