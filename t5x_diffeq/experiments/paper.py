"""The paper's experiments at the size of a laptop and at its own, by their table or figure.

On a laptop, the text's name selects the config: configs/shakespeare.py for `shakespeare`, else
configs/laptop.py. The paper's own settings come from its text (section 6, appendices C and D).
Where our copy of the text lacks a number, it comes from the official code's config files
(SDML-KU/qkvflow, `config/`). Learning rate, batch size, steps and T are in the models' own configs
unless they are set here. The paper trains each model once; `--seeds=3` gives standard errors.

Where the paper compares the ODE with the per-layer `baseline`, two things differ: W(t), and the
scheme and step size. So the tables and figure 4 also have `euler`, which the paper doesn't have:
per-layer weights with the ODE's scheme and step size.
"""

from t5x_diffeq.experiments.experiment import Experiment, Keys, Sweep, Trainee, trainings
from t5x_diffeq.experiments.follow_ups import (
    CLUSTERING,
    COST_TABLES,
    FIGURE_3,
    GROWTH_TABLES,
    PROMPTS,
    TASK_TABLES,
    Figure5,
    analyse_lyapunov,
    analyse_spectra,
    ask_papers_tasks,
    time_steps,
)
from t5x_diffeq.experiments.present import TableSpec

_BASELINE, _EULER = (Trainee(variant, rates=(4e-3, 8e-3)) for variant in ("baseline", "euler"))
_ODE, _SHARED = (Trainee(variant, rates=(2e-3, 4e-3, 8e-3)) for variant in ("ode", "shared"))
_BOTH = ("ode", "baseline")
_WITH_EULER = ("baseline", "euler", "ode")
_ALL = ("baseline", "euler", "ode", "shared")
_LOSSES = (TableSpec(("text",), "model", "loss", over_steps=True),)

LAPTOP: dict[str, Experiment] = {
    "table1": Sweep(trainings=(_BASELINE, _EULER, _ODE, _SHARED)),
    "table2": Sweep(trainings=(_BASELINE, _EULER, _ODE)),
    "figure2": Experiment(
        trainings=trainings(["ode"]), follow_up=analyse_spectra, others=(CLUSTERING,), seeds=1
    ),
    "figure3": Experiment(
        trainings=trainings(["ode"]), follow_up=analyse_lyapunov(FIGURE_3), seeds=1
    ),
    "figure4": Experiment(trainings=trainings(_WITH_EULER), tables=_LOSSES),
    "figure5": Figure5(
        config="laptop.py",
        tuning={
            "train.batch_size": 8,
            "train.eval_batches": 64,
            "train.total_steps": 100,
            "train.eval_every": 50,
        },
        by_method={"lora": {"model.adapter_rank": 8}},  # embed_dim / 16
    ),
    "figure7": Experiment(
        trainings=trainings(_BOTH, {"optimizer.beta2": (0.95, 0.99, 0.999)}),
        tables=(TableSpec(("text", "model"), "beta2", "loss", over_steps=True),),
    ),
    "figure8": Experiment(
        trainings=trainings(_BOTH, {"model.architecture": ("llama",)}), tables=_LOSSES
    ),
    "figure13": Experiment(others=(CLUSTERING,), seeds=1),
    "figure14": Experiment(
        trainings=(
            *trainings(["ode"], {"model.time_embed_dim": (20, 48, 96, 144)}),
            Trainee("baseline"),
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


_SMALL, _MEDIUM, _LARGE, _LLAMA = "gpt_small.py", "gpt_medium.py", "gpt_large.py", "llama1b.py"
_OPENWEBTEXT: dict[str | None, Keys] = {_SMALL: {}, _MEDIUM: {}, _LARGE: {}, _LLAMA: {}}
_WIKITEXT_RUN: Keys = {
    "train.batch_size": 256,
    "train.total_steps": 10_000,
    "train.eval_every": 200,
}
_WIKITEXT: dict[str | None, Keys] = {
    _SMALL: _WIKITEXT_RUN,
    _MEDIUM: {**_WIKITEXT_RUN, "model.time_embed_dim": 48},
}
_PERPLEXITY = tuple(TableSpec(("text", "size"), "model", value) for value in ("perplexity", "loss"))
_PERPLEXITIES = (TableSpec(("text", "size"), "model", "perplexity", over_steps=True),)
# Apart from its method, a tuning has the settings of the training before; every weight decays.
_TUNING = {
    **_WIKITEXT_RUN,
    "data.cross_documents": True,
    "optimizer.learning_rate": 3e-4,
    "optimizer.beta2": 0.999,
}
_EVERY_DECAYS = {"optimizer.weight_decay": 0.1, "optimizer.decay": "all"}

PAPER: dict[str, Experiment] = {
    "table1": Experiment(
        trainings=trainings(_ALL, configs=_WIKITEXT),
        tables=_PERPLEXITY,
        seeds=1,
    ),
    "table2": Experiment(
        trainings=trainings(_WITH_EULER, configs=_OPENWEBTEXT), tables=_PERPLEXITY, seeds=1
    ),
    "table4": Experiment(
        trainings=trainings(_WITH_EULER, configs={_LARGE: {}}),
        follow_up=ask_papers_tasks,
        tables=TASK_TABLES,
        seeds=1,
    ),
    "table5": Experiment(
        trainings=trainings(_WITH_EULER, configs={_LLAMA: {}}),
        follow_up=ask_papers_tasks,
        tables=TASK_TABLES,
        seeds=1,
    ),
    "figure2": Experiment(
        trainings=trainings(["ode"], configs={_MEDIUM: {}}),
        follow_up=analyse_spectra,
        others=(CLUSTERING,),
        tables=GROWTH_TABLES,
        seeds=1,
    ),
    "figure3": Experiment(
        trainings=trainings(["ode"], configs={_MEDIUM: {}}),
        follow_up=analyse_lyapunov(FIGURE_3),
        seeds=1,
    ),
    "figure4": Experiment(
        trainings=trainings(_WITH_EULER, configs=_WIKITEXT), tables=_PERPLEXITIES, seeds=1
    ),
    "figure5": Figure5(
        config=_MEDIUM,
        base={
            "ode": {**_WIKITEXT_RUN, "model.time_embed_dim": 100, "model.num_frequencies": 256},
            "baseline": _WIKITEXT_RUN,
        },
        tuning=_TUNING,
        by_method={
            "lora": {**_EVERY_DECAYS, "model.adapter_rank": 200, "model.adapter_alpha": 8.0},
            "full": _EVERY_DECAYS,
            "hypernetwork": {"optimizer.weight_decay": 0.1},  # not in the paper
        },
    ),
    "figure7": Experiment(
        trainings=trainings(_BOTH, {"optimizer.beta2": (0.95, 0.999)}, {_LARGE: {}}),
        tables=(TableSpec(("text", "model"), "beta2", "perplexity", over_steps=True),),
        seeds=1,
    ),
    "figure8": Experiment(
        trainings=trainings(_BOTH, configs={_LLAMA: {}}), tables=_PERPLEXITIES, seeds=1
    ),
    "figure13": Experiment(others=(CLUSTERING,), seeds=1),
    "figure14": Experiment(
        trainings=(
            *trainings(["ode"], {"model.time_embed_dim": (48, 96, 144)}, {_LARGE: {}}),
            Trainee("baseline", config=_LARGE),
        ),
        tables=(TableSpec(("text",), "T", "perplexity", over_steps=True),),
        seeds=1,
    ),
    "figure15": Experiment(others=time_steps(_MEDIUM), tables=COST_TABLES, seeds=1),
    "figure18": Experiment(
        trainings=trainings(
            ["ode"], {"model.time_embedding": ("separate", "common")}, {_LARGE: {}}
        ),
        tables=(TableSpec(("text",), "time_embedding", "perplexity", over_steps=True),),
        seeds=1,
    ),
    "appendixE": Experiment(
        trainings=trainings(_BOTH, configs=_OPENWEBTEXT),
        trainings_on={"wikitext103": trainings(_BOTH, configs=_WIKITEXT)},
        follow_up=analyse_spectra,
        tables=GROWTH_TABLES,
        seeds=1,
    ),
    "appendixF": Experiment(
        trainings=trainings(["ode"], configs={_MEDIUM: {}}),
        trainings_on={"wikitext103": trainings(["ode"], configs={_SMALL: _WIKITEXT_RUN})},
        follow_up=analyse_lyapunov(PROMPTS),
        seeds=1,
    ),
}
