"""The paper's experiments at its own sizes, by the name of their table or figure.

Settings are those of the paper's text (section 6, appendices C and D) and, where our copy of it
lacks a number, those of the official code's config files (SDML-KU/qkvflow, `config/`). Learning
rate, batch size, steps and T are in the models' own configs unless they are set here. The paper
trains each model once; `--seeds=3` gives standard errors.
"""

from t5x_diffeq.experiments.analyses import GROWTH_LAYOUTS, Analyses
from t5x_diffeq.experiments.budgets import Budgets
from t5x_diffeq.experiments.comparison import Choices, Comparison
from t5x_diffeq.experiments.cost import WIDTHS, Cost
from t5x_diffeq.experiments.downstream import TaskScores
from t5x_diffeq.experiments.experiment import Experiment, Keys
from t5x_diffeq.experiments.figure5 import Figure5
from t5x_diffeq.experiments.present import Layout
from t5x_diffeq.experiments.prompts import FIGURE_3, PROMPTS

OWN: dict[str, Choices] = {"ode": {}, "baseline": {}}
LARGE: dict[str, Keys] = {"gpt_large.py": {}}
LLAMA: dict[str, Keys] = {"llama1b.py": {}}
OPENWEBTEXT: dict[str, Keys] = {"gpt_small.py": {}, "gpt_medium.py": {}, **LARGE, **LLAMA}
WIKITEXT_RUN: Keys = {"train.batch_size": 256, "train.total_steps": 10_000, "train.eval_every": 200}
WIKITEXT: dict[str, Keys] = {
    "gpt_small.py": WIKITEXT_RUN,
    "gpt_medium.py": {**WIKITEXT_RUN, "model.time_embed_dim": 48},
}
PERPLEXITY = tuple(Layout(("text", "size"), "model", value) for value in ("perplexity", "loss"))
OVER_STEPS = (Layout(("text", "size"), "model", "perplexity", over_steps=True),)
# Apart from its method, a tuning has the settings of the training before; every weight decays.
TUNING = {
    **WIKITEXT_RUN,
    "data.cross_documents": True,
    "optimizer.learning_rate": 3e-4,
    "optimizer.beta2": 0.999,
}
EVERY_DECAYS = {"optimizer.weight_decay": 0.1, "optimizer.decay": "all"}

PAPER: dict[str, Experiment] = {
    "table1": Comparison(
        models=WIKITEXT,
        variants={"baseline": {}, "shared": {}, "ode": {}},
        layouts=PERPLEXITY,
        seeds=1,
    ),
    "table2": Comparison(models=OPENWEBTEXT, variants=OWN, layouts=PERPLEXITY, seeds=1),
    "budgets": Budgets(config="gpt_small.py", seeds=1),  # not in the paper
    "table4": TaskScores(config="gpt_large.py", variants=("baseline", "ode"), seeds=1),
    "table5": TaskScores(config="llama1b.py", variants=("baseline", "ode"), seeds=1),
    "figure2": Analyses(
        models={"gpt_medium.py": {}},
        kinds=("spectra", "clustering"),
        variants={"ode": {}},
        layouts=GROWTH_LAYOUTS,
        seeds=1,
    ),
    "figure3": Analyses(
        models={"gpt_medium.py": {}},
        kinds=("lyapunov",),
        variants={"ode": {}},
        prompts=FIGURE_3,
        seeds=1,
    ),
    "figure4": Comparison(models=WIKITEXT, variants=OWN, layouts=OVER_STEPS, seeds=1),
    "figure5": Figure5(
        config="gpt_medium.py",
        base={
            "ode": {**WIKITEXT_RUN, "model.time_embed_dim": 100, "model.num_frequencies": 256},
            "baseline": WIKITEXT_RUN,
        },
        tuning=TUNING,
        of_method={
            "lora": {**EVERY_DECAYS, "model.adapter_rank": 200, "model.adapter_alpha": 8.0},
            "full": EVERY_DECAYS,
            "hypernetwork": {"optimizer.weight_decay": 0.1},  # not in the paper
        },
    ),
    "figure7": Comparison(
        models=LARGE,
        variants={variant: {"optimizer.beta2": (0.95, 0.999)} for variant in OWN},
        layouts=(Layout(("text", "model"), "beta2", "perplexity", over_steps=True),),
        seeds=1,
    ),
    "figure8": Comparison(models=LLAMA, variants=OWN, layouts=OVER_STEPS, seeds=1),
    "figure13": Analyses(kinds=("clustering",), variants={}, seeds=1),
    "figure14": Comparison(
        models=LARGE,
        variants={"ode": {"model.time_embed_dim": (48, 96, 144)}, "baseline": {}},
        layouts=(Layout(("text",), "T", "perplexity", over_steps=True),),
        seeds=1,
    ),
    "figure15": Cost(config="gpt_medium.py", widths=WIDTHS),
    "figure18": Comparison(
        models=LARGE,
        variants={"ode": {"model.time_embedding": ("per_layer", "shared")}},
        layouts=(Layout(("text",), "time_embedding", "perplexity", over_steps=True),),
        seeds=1,
    ),
    "appendixE": Analyses(
        models=OPENWEBTEXT,
        models_of={"wikitext103": WIKITEXT},
        kinds=("spectra",),
        variants=OWN,
        layouts=GROWTH_LAYOUTS,
        seeds=1,
    ),
    "appendixF": Analyses(
        models={"gpt_medium.py": {}},
        models_of={"wikitext103": {"gpt_small.py": WIKITEXT_RUN}},
        kinds=("lyapunov",),
        variants={"ode": {}},
        prompts=PROMPTS,
        seeds=1,
    ),
}
