"""The paper's experiments at the size of a laptop, by the name of their table or figure.

The text's name selects the config: configs/shakespeare.py for `shakespeare`, else
configs/laptop.py.
"""

from t5x_diffeq.experiments.analyses import Analyses, SpectraStudy
from t5x_diffeq.experiments.budgets import Budgets
from t5x_diffeq.experiments.comparison import Choices, Comparison
from t5x_diffeq.experiments.controls import controls
from t5x_diffeq.experiments.cost import WIDTHS, Cost
from t5x_diffeq.experiments.depth_transfer import DepthTransfer
from t5x_diffeq.experiments.equal_time import EqualTime
from t5x_diffeq.experiments.experiment import Experiment
from t5x_diffeq.experiments.figure5 import Figure5
from t5x_diffeq.experiments.learning_rates import Sweep, SweptModel
from t5x_diffeq.experiments.present import TableSpec
from t5x_diffeq.experiments.prompts import FIGURE_3, PROMPTS
from t5x_diffeq.experiments.task_scores import TaskScores
from t5x_diffeq.experiments.update_sources import UpdateSources

_SWEPT = {
    "baseline": SweptModel("baseline", (4e-3, 8e-3)),
    "ode": SweptModel("ode", (2e-3, 4e-3, 8e-3)),
    "shared": SweptModel("shared", (2e-3, 4e-3, 8e-3)),
}
_OVER_STEPS = (TableSpec(("text",), "model", "loss", over_steps=True),)
_OWN: dict[str, Choices] = {"ode": {}, "baseline": {}}
_VARIANTS = ("baseline", "ode", "shared")
_PENALTY = {"train.velocity_penalty": 0.1}

LAPTOP: dict[str, Experiment] = {
    "table1": Sweep(models=_SWEPT),
    "table2": Sweep(models={each: _SWEPT[each] for each in ("baseline", "ode")}),
    "budgets": Budgets(),
    "equal_time": EqualTime(
        config="workstation.py",
        models={
            **{
                variant: SweptModel(variant, (2e-3, 4e-3))
                for variant in (*_VARIANTS, "compact", "smooth")
            },
            "baseline with penalty": SweptModel("baseline", (1e-3, 2e-3), _PENALTY),
            "compact with penalty": SweptModel("compact", (2e-3, 4e-3), _PENALTY),
        },
    ),
    "controls": Sweep(models=controls(baseline=(1e-3, 2e-3, 4e-3), ode=(2e-3, 4e-3))),
    "update_sources": UpdateSources(
        models={"laptop.py": {}},
        variants={
            "ode": {"model.time_basis": ("sinusoids", "table:12"), "train.watch_every": (50,)}
        },
        tables=(TableSpec(("text",), "time_basis", "loss", over_steps=True),),
        seeds=1,
    ),
    "depth_transfer": DepthTransfer(
        config="laptop.py",
        rates=(1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2),
        keys={
            "model.embed_dim": 64,
            "model.mlp_dim": 256,
            "model.time_embed_dim": 16,
            "train.total_steps": 200,
            "train.batch_size": 4,
            "train.eval_every": 200,
            "train.eval_batches": 16,
        },
    ),
    "table4": TaskScores(variants=_VARIANTS, keys={"model.architecture": "gpt"}),
    "table5": TaskScores(variants=_VARIANTS, keys={"model.architecture": "llama"}),
    "figure2": Analyses(kinds=("spectra", "clustering"), variants={"ode": {}}, seeds=1),
    "figure3": Analyses(kinds=("lyapunov",), variants={"ode": {}}, prompts=FIGURE_3, seeds=1),
    "figure4": Comparison(variants=_OWN, tables=_OVER_STEPS),
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
    "figure7": Comparison(
        variants={variant: {"optimizer.beta2": (0.95, 0.999)} for variant in _VARIANTS[:2]},
        tables=(TableSpec(("text", "model"), "beta2", "loss", over_steps=True),),
    ),
    "figure8": Comparison(
        variants={variant: {"model.architecture": ("llama",)} for variant in _OWN},
        tables=_OVER_STEPS,
    ),
    "figure13": Analyses(kinds=("clustering",), variants={}, seeds=1),
    "figure14": Comparison(
        variants={"ode": {"model.time_embed_dim": (20, 48, 96, 144)}, "baseline": {}},
        tables=(TableSpec(("text",), "T", "loss", over_steps=True),),
    ),
    "figure15": Cost(config="laptop.py", widths=WIDTHS),
    "figure18": Comparison(
        variants={
            "ode": {
                "model.time_embedding": ("separate", "common"),
                "model.time_embed_dim": (20, 48),
            }
        },
        tables=(TableSpec(("text", "time_embedding"), "T", "loss", over_steps=True),),
    ),
    "appendixE": SpectraStudy(),
    "appendixF": Analyses(kinds=("lyapunov",), variants={"ode": {}}, prompts=PROMPTS, seeds=1),
}
