"""Own ends, and a middle band that is read twice: of two layers, or W(t).

    python -m studies.read_twice --text=stdlib

The first model reads four layers in six steps: the first layer, the two middle layers twice, and
the last layer. The middle of the second model is W(t) = W0 + P e(t) with as many kernels (T = 1).
GPT with four layers and 1.5 times the optimizer steps has the same parameters and FLOPs; GPT with
six layers has the same FLOPs.
"""

from studies.study import Model, Models, run_study, sweeps_at_two_scales
from t5x_diffeq.experiments.experiment import Keys

_LAYERS, _N = 4, 6
_FOUR: Keys = {"model.num_steps": _LAYERS}
_W_OF_T: Keys = {"model.weights": "examples.own_source:OwnEnds", "model.time_embed_dim": 1}
_MODELS: Models = {
    "two layers twice": Model("baseline", {"model.weights": "examples.depth.own_ends:OwnEnds"}),
    "W(t) between the ends": Model("ode", _W_OF_T),
    "GPT, 4 layers": Model("baseline", _FOUR, steps=_N / _LAYERS),
    "GPT, 6 layers": Model("baseline"),
    "GPT, Euler's scheme, 4 layers": Model("euler", _FOUR, steps=_N / _LAYERS),
    "GPT, Euler's scheme, 6 layers": Model("euler"),
}
LAPTOP, PAPER = sweeps_at_two_scales(lambda width: _MODELS)

if __name__ == "__main__":
    run_study("read_twice", __doc__, LAPTOP, PAPER)
