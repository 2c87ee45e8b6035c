"""Attention from two kernels and a wide MLP, with GPT's number of parameters.

    python -m studies.two_kernels --text=stdlib

Q and K vary smoothly with depth in trained transformers, V does not (arXiv 2605.04971). So
attention has W0 and one P here (T = 1), and the parameters saved go into an MLP of T = 5 that is a
third wider. GPT with this MLP has the same FLOPs and more parameters; GPT with 1.22 times the
optimizer steps has the same FLOPs and the same parameters.
"""

from studies.study import Model, Models, run_study, sweeps_at_two_scales
from t5x_diffeq.experiments.experiment import Keys

_EVERY: Keys = {
    # e(t) stays as it was initialised, as it does in `:ode` with Muon.
    "optimizer.role_multipliers": (),
}
_MORE_FLOPS = 1.22  # FLOPs with the wider MLP, over GPT's


def _models(width: int) -> Models:
    wide: Keys = {"model.mlp_dim": round(width * 16 / 3)}
    T: Keys = {"model.time_embed_dim": 5, "model.attention_time_embed_dim": 1}
    return {
        "two kernels": Model("compact", {**wide, **T}),
        "GPT": Model("baseline"),
        "GPT, 1.22 times the steps": Model("baseline", steps=_MORE_FLOPS),
        "GPT, wide MLP": Model("baseline", wide),
        "GPT, Euler's scheme, 1.22 times the steps": Model("euler", steps=_MORE_FLOPS),
    }


LAPTOP, PAPER = sweeps_at_two_scales(_models, _EVERY, seeds=5)

if __name__ == "__main__":
    run_study("two_kernels", __doc__, LAPTOP, PAPER)
