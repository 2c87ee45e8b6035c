"""A rung of the ladder for a quarter of an hour of one GPU: width 256, 9.4M parameters of kernels.

    launch/reproduce/gpu_quarter.sh --text=PATH [--minutes=8] [--at_once=4]

Each model trains once, on 20 bytes for each parameter of the baseline's kernels. Its learning rate
is the best of width 48 times 48 / 256; with Muon, the best of width 64 times 64 / 256. (With
Muon's best rate of width 32, 3.2e-2, the loss stayed 0.2 above Adam's.) At laptop scale the same
models train for a hundredth of the steps at width 32, as a rehearsal. Weight decay is 0.1 for all.
"""

from studies.study import run_study
from t5x_diffeq.experiments.experiment import Experiment, Keys, Trainee, at_rate
from t5x_diffeq.experiments.present import TableSpec

_MUON: Keys = {"optimizer.name": "muon"}
_FROZEN_OWN_ENDS: Keys = {
    "optimizer.role_multipliers": (("time_embedding", 0.0),),
    "model.weights": "examples.own_source:OwnEnds",
}
# By name: the variant, the keys that it sets, and the learning rate at width 256.
_MODELS: dict[str, tuple[str, Keys, float]] = {
    "baseline": ("baseline", {}, 3e-3),
    "euler": ("euler", {}, 3e-3),
    "compact": ("compact", {}, 1.5e-3),
    "ode": ("ode", {}, 3e-3),
    "ode, own ends, muon": ("ode", {**_MUON, **_FROZEN_OWN_ENDS}, 2e-3),
    "euler, muon": ("euler", _MUON, 8e-3),
    "smooth": ("smooth", {}, 1.5e-3),
}
_TABLES = tuple(
    TableSpec(("model",), "text", value) for value in ("loss", "tokens_per_second", "seconds")
)


def _rung(width: int, keys: Keys) -> Experiment:
    return Experiment(
        trainings=tuple(
            at_rate(Trainee(f"{variant}-{width}", {**preset, **keys}, name, "ladder.py"), rate)
            for name, (variant, preset, rate) in _MODELS.items()
        ),
        tables=_TABLES,
        seeds=1,
    )


_DECAY: Keys = {"optimizer.weight_decay": 0.1}
LAPTOP = _rung(32, {**_DECAY, "train.total_steps": 115, "train.checkpoint_every": 50})
PAPER = _rung(256, {**_DECAY, "model.dtype": "bfloat16", "train.checkpoint_every": 3000})

if __name__ == "__main__":
    run_study("gpu_quarter", __doc__, LAPTOP, PAPER)
