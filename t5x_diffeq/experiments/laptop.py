"""The paper's experiments at the size of a laptop, by the name of their table or figure.

The text's name selects the config: configs/shakespeare.py for `shakespeare`, else
configs/laptop.py.
"""

from t5x_diffeq.experiments.experiment import Experiment, Sweep, Training, trainings
from t5x_diffeq.experiments.figure5 import Figure5
from t5x_diffeq.experiments.follow_ups import (
    CLUSTERING,
    COST_TABLES,
    FIGURE_3,
    GROWTH_TABLES,
    PROMPTS,
    TASK_TABLES,
    analyse_lyapunov,
    analyse_spectra,
    ask_own_tasks,
    time_steps,
)
from t5x_diffeq.experiments.present import TableSpec

_BASELINE = Training("baseline", rates=(4e-3, 8e-3))
_ODE, _SHARED = (Training(variant, rates=(2e-3, 4e-3, 8e-3)) for variant in ("ode", "shared"))
_OVER_STEPS = (TableSpec(("text",), "model", "loss", over_steps=True),)
_BOTH = ("ode", "baseline")
_VARIANTS = ("baseline", "ode", "shared")

LAPTOP: dict[str, Experiment] = {
    "table1": Sweep(trainings=(_BASELINE, _ODE, _SHARED)),
    "table2": Sweep(trainings=(_BASELINE, _ODE)),
    "table4": Experiment(
        trainings=trainings(_VARIANTS, {"model.architecture": ("gpt",)}),
        follow_up=ask_own_tasks,
        tables=TASK_TABLES,
    ),
    "table5": Experiment(
        trainings=trainings(_VARIANTS, {"model.architecture": ("llama",)}),
        follow_up=ask_own_tasks,
        tables=TASK_TABLES,
    ),
    "figure2": Experiment(
        trainings=trainings(["ode"]), follow_up=analyse_spectra, others=(CLUSTERING,), seeds=1
    ),
    "figure3": Experiment(
        trainings=trainings(["ode"]), follow_up=analyse_lyapunov(FIGURE_3), seeds=1
    ),
    "figure4": Experiment(trainings=trainings(_BOTH), tables=_OVER_STEPS),
    "figure5": Figure5(
        config="laptop.py",
        tuning={
            "train.batch_size": 8,
            "train.eval_batches": 64,
            "train.total_steps": 100,
            "train.eval_every": 50,
        },
        of_method={"lora": {"model.adapter_rank": 8}},  # embed_dim / 16
    ),
    "figure7": Experiment(
        trainings=trainings(_BOTH, {"optimizer.beta2": (0.95, 0.99, 0.999)}),
        tables=(TableSpec(("text", "model"), "beta2", "loss", over_steps=True),),
    ),
    "figure8": Experiment(
        trainings=trainings(_BOTH, {"model.architecture": ("llama",)}), tables=_OVER_STEPS
    ),
    "figure13": Experiment(others=(CLUSTERING,), seeds=1),
    "figure14": Experiment(
        trainings=(
            *trainings(["ode"], {"model.time_embed_dim": (20, 48, 96, 144)}),
            Training("baseline"),
        ),
        tables=(TableSpec(("text",), "T", "loss", over_steps=True),),
    ),
    "figure15": Experiment(others=time_steps("laptop.py"), tables=COST_TABLES, seeds=1),
    "figure18": Experiment(
        trainings=trainings(
            ["ode"],
            {"model.time_embedding": ("separate", "common"), "model.time_embed_dim": (20, 48)},
        ),
        tables=(TableSpec(("text", "time_embedding"), "T", "loss", over_steps=True),),
    ),
    "appendixE": Experiment(
        trainings=trainings(_BOTH), follow_up=analyse_spectra, tables=GROWTH_TABLES
    ),
    "appendixF": Experiment(
        trainings=trainings(["ode"]), follow_up=analyse_lyapunov(PROMPTS), seeds=1
    ),
}
