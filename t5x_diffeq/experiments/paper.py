"""The paper's experiments at its own sizes, by the name of their table or figure.

Settings are those of the paper's text (section 6, appendices C and D) and, where our copy of it
lacks a number, those of the official code's config files (SDML-KU/qkvflow, `config/`). Learning
rate, batch size, steps and T are in the models' own configs unless they are set here. The paper
trains each model once; `--seeds=3` gives standard errors.
"""

from t5x_diffeq.experiments.experiment import Experiment, Keys, Training, trainings
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
    ask_papers_tasks,
    time_steps,
)
from t5x_diffeq.experiments.present import TableSpec

_BOTH = ("ode", "baseline")
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
    "table1": Experiment(
        trainings=trainings(("baseline", "shared", "ode"), configs=_WIKITEXT),
        tables=_PERPLEXITY,
        seeds=1,
    ),
    "table2": Experiment(
        trainings=trainings(_BOTH, configs=_OPENWEBTEXT), tables=_PERPLEXITY, seeds=1
    ),
    "table4": Experiment(
        trainings=trainings(("baseline", "ode"), configs={_LARGE: {}}),
        follow_up=ask_papers_tasks,
        tables=TASK_TABLES,
        seeds=1,
    ),
    "table5": Experiment(
        trainings=trainings(("baseline", "ode"), configs={_LLAMA: {}}),
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
        trainings=trainings(_BOTH, configs=_WIKITEXT), tables=_OVER_STEPS, seeds=1
    ),
    "figure5": Figure5(
        config=_MEDIUM,
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
    "figure7": Experiment(
        trainings=trainings(_BOTH, {"optimizer.beta2": (0.95, 0.999)}, {_LARGE: {}}),
        tables=(TableSpec(("text", "model"), "beta2", "perplexity", over_steps=True),),
        seeds=1,
    ),
    "figure8": Experiment(
        trainings=trainings(_BOTH, configs={_LLAMA: {}}), tables=_OVER_STEPS, seeds=1
    ),
    "figure13": Experiment(others=(CLUSTERING,), seeds=1),
    "figure14": Experiment(
        trainings=(
            *trainings(["ode"], {"model.time_embed_dim": (48, 96, 144)}, {_LARGE: {}}),
            Training("baseline", config=_LARGE),
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
