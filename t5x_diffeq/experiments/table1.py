"""Tables 1 and 2 of the paper: ODE, baseline and shared weights, each at its best learning rate."""

from t5x_diffeq.experiments.comparison import SEEDS, some_text, training
from t5x_diffeq.experiments.present import Layout
from t5x_diffeq.experiments.runs import Run

RATES = (5e-4, 1e-3, 2e-3, 4e-3)
LAYOUTS = tuple(
    Layout(row=("model",), column="text", value=value, best_of="learning_rate")
    for value in ("loss", "perplexity")
)


def runs(scale: str, texts: dict[str, dict[str, object]]) -> list[Run]:
    """All runs.

    Args:
      scale: "laptop" or "paper".
      texts: by name, their keys of the config.

    Raises:
      InputError: if there is none.
    """
    return [
        training(scale, text, keys, variant, seed, optimizer__learning_rate=rate)
        for text, keys in some_text(texts).items()
        for variant in ("baseline", "ode", "shared")
        for rate in RATES
        for seed in SEEDS
    ]
