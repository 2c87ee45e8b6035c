"""Four hypotheses about W(t) = W0 + P e(t), against GPT with Euler's scheme, at width 32.

    python -m studies.hypotheses --text=stdlib

1. e(t) is hardly trained: not at all (frozen), or only until some optimizer step.
2. The norm of each W(t_n) is held, in place of weight decay (Hyperball, arXiv 2606.16899).
3. The step size is N^-a: a = 1 is the ODE's, a = 1/2 keeps the variance of a sum of N terms.
4. The first and the last step have weights of their own (Hyperloop, arXiv 2604.21254).

With T = N - 1, or N - 3 if the ends have their own weights, there are as many kernels as in GPT's N
layers. Weight decay is 0.1 for all; where norms are held, only the embeddings decay. The optimizers
of hypotheses 1 and 2 are in `muon_variants`.
"""

from studies.study import run_study
from t5x_diffeq.experiments.experiment import Keys, Sweep, Trainee

_N, _T = 6, "model.time_embed_dim"  # N of configs/ladder.py at these widths
_FROZEN: Keys = {"optimizer.role_multipliers": (("time_embedding", 0.0),)}
_ENDS: Keys = {"model.weights": "examples.own_source:OwnEnds"}
_MUON, _ADAM = (3.2e-2, 1.6e-2, 6.4e-2), (1.6e-2, 8e-3, 3.2e-2)  # the rates to begin with


def _step_size(a: float) -> Keys:
    """N^-a, as c/N."""
    return {"model.step_size": f"{_N ** (1 - a):.4g}/N"}


def _variant(name: str) -> Keys:
    return {"optimizer.name": f"studies.muon_variants:{name}"}


_HELD: Keys = {**_variant("with_norms_held"), "optimizer.decay": "embeddings"}
_WITH_MUON: dict[str, dict[str, Keys]] = {
    "euler": {
        "": {},
        "a = 1/2": _step_size(1 / 2),
        "a = 3/4": _step_size(3 / 4),
        "norms held": _HELD,
    },
    "ode": {
        "frozen": _FROZEN,
        "frozen, T = 5": {**_FROZEN, _T: _N - 1},
        "frozen, own ends": {**_FROZEN, **_ENDS},
        "frozen, own ends, T = 3": {**_FROZEN, **_ENDS, _T: _N - 3},
        "frozen, a = 1/2": {**_FROZEN, **_step_size(1 / 2)},
        "frozen, a = 3/4": {**_FROZEN, **_step_size(3 / 4)},
        "frozen, norms held": {**_FROZEN, **_HELD},
        "frozen after warm-up": _variant("frozen_after_warm_up"),
        "frozen after a quarter": _variant("frozen_after_a_quarter"),
    },
}
_WITH_ADAM: dict[str, dict[str, Keys]] = {
    "euler": {"": {}, "a = 1/2": _step_size(1 / 2), "a = 3/4": _step_size(3 / 4)},
    "ode": {"": {}, "own ends": _ENDS, "a = 1/2": _step_size(1 / 2), "a = 3/4": _step_size(3 / 4)},
}


def _trainings(
    optimizer: str, rates: tuple[float, ...], variants: dict[str, dict[str, Keys]]
) -> list[Trainee]:
    return [
        Trainee(
            f"{variant}-32",
            {"optimizer.name": optimizer, "optimizer.weight_decay": 0.1, **keys},
            ", ".join(filter(None, (variant, optimizer, name))),
            "ladder.py",
            rates,
        )
        for variant, hypotheses in variants.items()
        for name, keys in hypotheses.items()
    ]


LAPTOP = PAPER = Sweep(
    trainings=(*_trainings("muon", _MUON, _WITH_MUON), *_trainings("adam", _ADAM, _WITH_ADAM))
)

if __name__ == "__main__":
    run_study("hypotheses", __doc__, LAPTOP, PAPER)
