"""Figure 14 of the paper: the width T of the time embedding, at one learning rate."""

from t5x_diffeq.experiments.comparison import SEEDS, some_text, training
from t5x_diffeq.experiments.present import Layout
from t5x_diffeq.experiments.runs import Run

LAYOUTS = (Layout(row=("text",), column="time_embed_dim", value="loss"),)
WIDTHS = (20, 48, 96, 144)


def runs(scale: str, texts: dict[str, dict[str, object]]) -> list[Run]:
    """All runs.

    Args:
      scale: "laptop" or "paper".
      texts: by name, their keys of the config.

    Raises:
      InputError: if there is none.
    """
    return [
        training(scale, text, keys, "ode", seed, model__time_embed_dim=T)
        for text, keys in some_text(texts).items()
        for T in WIDTHS
        for seed in SEEDS
    ]
