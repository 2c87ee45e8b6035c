"""One checkpoint for 2, 4 and 12 solver steps: W(t) against nested layers, and a GPT for each.

    python -m studies.many_depths --text=stdlib

Each model is trained at the three numbers of steps at once (pairs of them, distillation 0.5) and
evaluated at each; its loss is the mean of the three. The control has one stack of 12 layers, of
which fewer steps take every third or sixth (`examples.depth.nested_layers`). `apart` are GPTs for a
single number of steps each, trained for a third of the time of the others, so that the three take
as long as one model for all numbers. Weight decay is 0.1 for all, and every model has the best rate
of its sweep.
"""

from studies.study import run_study
from t5x_diffeq.experiments.experiment import RATE_NAME, Keys, Sweep, Trainee
from t5x_diffeq.experiments.present import TableSpec
from t5x_diffeq.experiments.runs import ExperimentRun

_DEPTHS = (2, 4, 12)
_STEPS = 1400
# An optimizer step of the pairs takes 12 solver steps on average, as many as the largest depth.
_STEPS_APART = _STEPS * max(_DEPTHS) // sum(_DEPTHS)
_NESTED: Keys = {"model.weights": "examples.depth.nested_layers:NestedLayers"}
_TOGETHER: Keys = {
    "train.total_steps": _STEPS,
    "train.depths": _DEPTHS,
    "train.depths_per_step": 2,
    "train.depths_distill": 0.5,
}
_EVERY: Keys = {"optimizer.weight_decay": 0.1}
_MODELS: dict[str, tuple[str, Keys]] = {
    "nested": ("euler", {**_NESTED, **_TOGETHER}),
    "ode": ("ode", _TOGETHER),
    "smooth": ("smooth", _TOGETHER),
    **{
        f"apart, {depth} steps": (
            "baseline",
            {"model.num_steps": depth, "train.total_steps": _STEPS_APART},
        )
        for depth in _DEPTHS
    },
}
_RATES = {"muon": (1.6e-2, 8e-3, 3.2e-2), "adam": (4e-3, 2e-3, 8e-3)}


def _evaluate(trained: ExperimentRun) -> list[ExperimentRun]:
    """Evaluates a model of many depths at each of them; a GPT apart has its own loss."""
    if "depths" not in trained.labels:
        return []
    name = f"{trained.name}-evaluated"
    arguments = (
        f"--workdir={{output}}/{trained.name}",
        f"--num_steps={','.join(map(str, _DEPTHS))}",
        "--eval_batches=64",
        "--trust_plugins",
    )
    return [ExperimentRun(name, "evaluate", arguments, trained.labels, trained.name)]


def _trainings(optimizer: str, width: int) -> tuple[Trainee, ...]:
    sizes: Keys = {"model.embed_dim": width, "model.mlp_dim": 4 * width}
    return tuple(
        Trainee(
            variant,
            {"optimizer.name": optimizer, **sizes, **_EVERY, **keys},
            f"{name}, {optimizer}, {width}",
            "laptop.py",
            _RATES[optimizer],
        )
        for name, (variant, keys) in _MODELS.items()
    )


_TABLES = tuple(
    TableSpec(("model",), "text", value, RATE_NAME)
    for value in ("loss", *(f"{depth} steps" for depth in _DEPTHS))
)
LAPTOP = PAPER = Sweep(
    trainings=tuple(
        training
        for optimizer, width in (("muon", 96), ("muon", 144), ("adam", 96), ("adam", 144))
        for training in _trainings(optimizer, width)
    ),
    tables=_TABLES,
    follow_up=_evaluate,
)

if __name__ == "__main__":
    run_study("many_depths", __doc__, LAPTOP, PAPER)
