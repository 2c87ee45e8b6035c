"""One checkpoint for several numbers of solver steps: W(t) against nested layers, and GPTs apart.

    python -m studies.many_depths --text=stdlib

Each model is trained at three numbers of steps at once (pairs of them, distillation 0.5) and
evaluated at each; its loss is the mean of the three. The control has one stack of as many layers as
the largest number, of which fewer steps take every second, third, ...
(`examples.depth.nested_layers`). `apart` are GPTs for a single number of steps each. Each of them
is trained for two thirds of the others' optimizer steps, so that the three take as many solver
steps as one model for all numbers. Weight decay is 0.1 for all, and every model has the best rate
of its sweep.
"""

from collections.abc import Mapping
from functools import partial

from studies.study import lengthened, run_study
from t5x_diffeq.experiments.experiment import RATE_NAME, Keys, Sweep, Trainee
from t5x_diffeq.experiments.present import TableSpec
from t5x_diffeq.experiments.runs import ExperimentRun

# Optimizer steps of a GPT apart, over those of the pairs: a step of a pair takes 2/3 of the sum of
# the three numbers of steps, and the three GPTs together take the whole sum.
_APART = 2 / 3
_EVERY: Keys = {"optimizer.weight_decay": 0.1, "train.velocity_penalty": 0.0}
_RATES = {"muon": (1.6e-2, 8e-3, 3.2e-2), "adam": (4e-3, 2e-3, 8e-3)}


def _evaluate(depths: tuple[int, ...], trained: ExperimentRun) -> list[ExperimentRun]:
    """Evaluates a model of many depths at each of them; a GPT apart has its own loss."""
    if "depths" not in trained.labels:
        return []
    name = f"{trained.name}-evaluated"
    arguments = (
        f"--workdir={{output}}/{trained.name}",
        f"--num_steps={','.join(map(str, depths))}",
        "--eval_batches=64",
        "--trust_plugins",
    )
    return [ExperimentRun(name, "evaluate", arguments, trained.labels, trained.name)]


def _models(depths: tuple[int, ...], length: float) -> dict[str, tuple[str, Keys]]:
    """By name, the variant and the keys of each model."""
    nested: Keys = {
        "model.weights": f"examples.depth.nested_layers:NestedLayers(layers={max(depths)})"
    }
    together: Keys = {
        **lengthened(length),
        "train.depths": depths,
        "train.depths_per_step": 2,
        "train.depths_distill": 0.5,
    }
    return {
        "nested": ("euler", {**nested, **together}),
        "ode": ("ode", together),
        # W0 and max(depths) - 1 matrices P, as many kernels as the control has
        "ode, as many parameters": ("ode", {**together, "model.time_embed_dim": max(depths) - 1}),
        "smooth": ("smooth", together),
        **{
            f"apart, {depth} steps": (
                "baseline",
                {"model.num_steps": depth, **lengthened(_APART * length)},
            )
            for depth in depths
        },
    }


def _sweep(
    config: str, widths: Mapping[str, tuple[int, ...]], depths: tuple[int, ...], length: float
) -> Sweep:
    """The study on a config of any width, or on the ladder, whose variants name the width.

    Args:
      config: the config file.
      widths: the widths with each optimizer.
      depths: the numbers of solver steps of one model.
      length: its optimizer steps, over the config's.
    """
    trainings = []
    for optimizer, of_optimizer in widths.items():
        for width in of_optimizer:
            sizes: Keys = {"model.embed_dim": width, "model.mlp_dim": 4 * width}
            for name, (variant, keys) in _models(depths, length).items():
                trainings.append(
                    Trainee(
                        f"{variant}-{width}" if config == "ladder.py" else variant,
                        {"optimizer.name": optimizer, **sizes, **_EVERY, **keys},
                        f"{name}, {optimizer}, {width}",
                        config,
                        _RATES[optimizer],
                    )
                )
    return Sweep(
        trainings=tuple(trainings),
        tables=tuple(
            TableSpec(("model",), "text", value, RATE_NAME)
            for value in ("loss", *(f"{depth} steps" for depth in depths))
        ),
        follow_up=partial(_evaluate, depths),
    )


LAPTOP = _sweep("ladder.py", {"muon": (32, 48), "adam": (32,)}, (2, 3, 6), 0.5)
PAPER = _sweep("laptop.py", {"muon": (96, 144), "adam": (96, 144)}, (2, 4, 12), 1.0)

if __name__ == "__main__":
    run_study("many_depths", __doc__, LAPTOP, PAPER)
