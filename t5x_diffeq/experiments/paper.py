"""The paper's experiments at its own sizes, by the name of their table or figure.

Settings are those of the paper's text (section 6, appendices C and D) and, where our copy of it
lacks a number, those of the official code's config files (SDML-KU/qkvflow, `config/`). Learning
rate, batch size, steps and T are in the models' own configs unless they are set here. The paper
trains each model once; `--seeds=3` gives standard errors.
"""

from t5x_diffeq.experiments.analyses import GROWTH_TABLES, Analyses
from t5x_diffeq.experiments.budgets import Budgets
from t5x_diffeq.experiments.comparison import Choices, Comparison
from t5x_diffeq.experiments.controls import controls
from t5x_diffeq.experiments.cost import WIDTHS, Cost
from t5x_diffeq.experiments.depth_transfer import DepthTransfer
from t5x_diffeq.experiments.equal_time import EqualTime
from t5x_diffeq.experiments.experiment import Experiment, Keys
from t5x_diffeq.experiments.figure5 import Figure5
from t5x_diffeq.experiments.learning_rates import Sweep, SweptModel
from t5x_diffeq.experiments.present import TableSpec
from t5x_diffeq.experiments.prompts import FIGURE_3, PROMPTS
from t5x_diffeq.experiments.task_scores import TaskScores
from t5x_diffeq.experiments.update_sources import UpdateSources

_OWN: dict[str, Choices] = {"ode": {}, "baseline": {}}
_LARGE: dict[str, Keys] = {"gpt_large.py": {}}
_LLAMA: dict[str, Keys] = {"llama1b.py": {}}
_OPENWEBTEXT: dict[str, Keys] = {"gpt_small.py": {}, "gpt_medium.py": {}, **_LARGE, **_LLAMA}
_WIKITEXT_RUN: Keys = {
    "train.batch_size": 256,
    "train.total_steps": 10_000,
    "train.eval_every": 200,
}
_WIKITEXT: dict[str, Keys] = {
    "gpt_small.py": _WIKITEXT_RUN,
    "gpt_medium.py": {**_WIKITEXT_RUN, "model.time_embed_dim": 48},
}
_PERPLEXITY = tuple(TableSpec(("text", "size"), "model", value) for value in ("perplexity", "loss"))
_OVER_STEPS = (TableSpec(("text", "size"), "model", "perplexity", over_steps=True),)
# Apart from its method, a tuning has the settings of the training before; every weight decays.
_TUNING = {
    **_WIKITEXT_RUN,
    "data.cross_documents": True,
    "optimizer.learning_rate": 3e-4,
    "optimizer.beta2": 0.999,
}
_EVERY_DECAYS = {"optimizer.weight_decay": 0.1, "optimizer.decay": "all"}

PAPER: dict[str, Experiment] = {
    "table1": Comparison(
        models=_WIKITEXT,
        variants={"baseline": {}, "shared": {}, "ode": {}},
        tables=_PERPLEXITY,
        seeds=1,
    ),
    "table2": Comparison(models=_OPENWEBTEXT, variants=_OWN, tables=_PERPLEXITY, seeds=1),
    "budgets": Budgets(config="gpt_small.py", seeds=1),  # not in the paper
    "equal_time": EqualTime(
        config="gpt_small.py",
        models={
            variant: SweptModel(variant, (3e-4, 6e-4, 1.2e-3))
            for variant in (*_OWN, "compact", "smooth")
        },
        seeds=1,
    ),  # not in the paper
    "controls": Sweep(
        config="gpt_small.py",
        models=controls(baseline=(3e-4, 6e-4, 1.2e-3), ode=(3e-4, 6e-4, 1.2e-3)),
        seeds=1,
    ),  # not in the paper
    "update_sources": UpdateSources(
        models={"gpt_small.py": {}},
        variants={
            "ode": {"model.time_basis": ("sinusoids", "table:12"), "train.watch_every": (500,)}
        },
        tables=(TableSpec(("text",), "time_basis", "loss", over_steps=True),),
        seeds=1,
    ),  # not in the paper
    "depth_transfer": DepthTransfer(
        config="gpt_small.py",
        rates=(3e-4, 6e-4, 1.2e-3, 2.4e-3),
        keys={
            "model.embed_dim": 256,
            "model.num_heads": 4,
            "model.mlp_dim": 1024,
            "train.total_steps": 2000,
            "train.batch_size": 64,
        },
    ),  # not in the paper
    "table4": TaskScores(config="gpt_large.py", variants=("baseline", "ode"), seeds=1),
    "table5": TaskScores(config="llama1b.py", variants=("baseline", "ode"), seeds=1),
    "figure2": Analyses(
        models={"gpt_medium.py": {}},
        kinds=("spectra", "clustering"),
        variants={"ode": {}},
        tables=GROWTH_TABLES,
        seeds=1,
    ),
    "figure3": Analyses(
        models={"gpt_medium.py": {}},
        kinds=("lyapunov",),
        variants={"ode": {}},
        prompts=FIGURE_3,
        seeds=1,
    ),
    "figure4": Comparison(models=_WIKITEXT, variants=_OWN, tables=_OVER_STEPS, seeds=1),
    "figure5": Figure5(
        config="gpt_medium.py",
        base={
            "ode": {**_WIKITEXT_RUN, "model.time_embed_dim": 100, "model.num_frequencies": 256},
            "baseline": _WIKITEXT_RUN,
        },
        tuning=_TUNING,
        of_method={
            "lora": {**_EVERY_DECAYS, "model.adapter_rank": 200, "model.adapter_alpha": 8.0},
            "full": _EVERY_DECAYS,
            "hypernetwork": {"optimizer.weight_decay": 0.1},  # not in the paper
        },
    ),
    "figure7": Comparison(
        models=_LARGE,
        variants={variant: {"optimizer.beta2": (0.95, 0.999)} for variant in _OWN},
        tables=(TableSpec(("text", "model"), "beta2", "perplexity", over_steps=True),),
        seeds=1,
    ),
    "figure8": Comparison(models=_LLAMA, variants=_OWN, tables=_OVER_STEPS, seeds=1),
    "figure13": Analyses(kinds=("clustering",), variants={}, seeds=1),
    "figure14": Comparison(
        models=_LARGE,
        variants={"ode": {"model.time_embed_dim": (48, 96, 144)}, "baseline": {}},
        tables=(TableSpec(("text",), "T", "perplexity", over_steps=True),),
        seeds=1,
    ),
    "figure15": Cost(config="gpt_medium.py", widths=WIDTHS),
    "figure18": Comparison(
        models=_LARGE,
        variants={"ode": {"model.time_embedding": ("separate", "common")}},
        tables=(TableSpec(("text",), "time_embedding", "perplexity", over_steps=True),),
        seeds=1,
    ),
    "appendixE": Analyses(
        models=_OPENWEBTEXT,
        models_of={"wikitext103": _WIKITEXT},
        kinds=("spectra",),
        variants=_OWN,
        tables=GROWTH_TABLES,
        seeds=1,
    ),
    "appendixF": Analyses(
        models={"gpt_medium.py": {}},
        models_of={"wikitext103": {"gpt_small.py": _WIKITEXT_RUN}},
        kinds=("lyapunov",),
        variants={"ode": {}},
        prompts=PROMPTS,
        seeds=1,
    ),
}
