"""The paper's experiments, by the name of their table or figure."""

from typing import Protocol

from t5x_diffeq.experiments.budgets import Budgets
from t5x_diffeq.experiments.comparison import Comparison, Keys
from t5x_diffeq.experiments.cost import Cost
from t5x_diffeq.experiments.downstream import TaskScores
from t5x_diffeq.experiments.figure5 import Figure5
from t5x_diffeq.experiments.present import Layout
from t5x_diffeq.experiments.runs import Run
from t5x_diffeq.experiments.sweep import Sweep


class Experiment(Protocol):
    """Runs, and the tables that come of them."""

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """The tables, each with its figure."""

    def runs(self, scale: str, texts: dict[str, Keys], done: dict[str, dict]) -> list[Run]:
        """The runs at a scale, "laptop" or "paper", on texts by name (their keys of the config).

        All of them, or those that what is `done` (outcomes by name) says the next of.
        """


RATE = "optimizer.learning_rate"
EXPERIMENTS: dict[str, Experiment] = {
    # Tables 1 and 2: the three kinds of weights, each at its best learning rate.
    "table1": Sweep(
        RATE,
        {"baseline": (4e-3, 8e-3), "ode": (2e-3, 4e-3, 8e-3), "shared": (2e-3, 4e-3, 8e-3)},
        (
            *(Layout(("model",), "text", v, "learning_rate") for v in ("loss", "perplexity")),
            Layout(("text", "model"), "learning_rate", "loss", log=True),
        ),
        papers=(3e-4, 6e-4, 1.2e-3),
    ),
    # Beside table 1: loss at equal steps, equal time and equal parameters.
    "budgets": Budgets(),
    # Tables 4 and 5: tasks, of models of GPT-large's and Llama-1B's shape.
    "table4": TaskScores("gpt_large.py", "gpt"),
    "table5": TaskScores("llama1b.py", "llama"),
    # Figure 5: trained with 18 steps, tuned with others.
    "figure5": Figure5(),
    # Figure 7: Adam's beta2.
    "figure7": Comparison(
        {variant: {"optimizer.beta2": (0.95, 0.999)} for variant in ("baseline", "ode")},
        (Layout(("text", "model"), "beta2", "loss"),),
    ),
    # Figure 14: the width T of the time embedding, at one learning rate.
    "figure14": Comparison(
        {"ode": {"model.time_embed_dim": (20, 48, 96, 144)}},
        (Layout(("text",), "time_embed_dim", "loss"),),
    ),
    # Figures 15 and 16, table 6: time, memory and parameters against T.
    "figure15": Cost(),
    # Figure 18: one time embedding for all kernels (appendix D.2), or one for each.
    "figure18": Comparison(
        {
            "ode": {
                "model.time_embedding": ("per_layer", "shared"),
                "model.time_embed_dim": (20, 48),
            }
        },
        (Layout(("text", "time_embedding"), "time_embed_dim", "loss"),),
    ),
}
