"""Figure 7 of the paper: beta2 = 0.95 against 0.999."""

from t5x_diffeq.experiments.comparison import SEEDS, some_text, training
from t5x_diffeq.experiments.present import Layout
from t5x_diffeq.experiments.runs import Run

LAYOUTS = (Layout(row=("model", "beta2"), column="text", value="loss"),)


def runs(scale: str, texts: dict[str, dict[str, object]]) -> list[Run]:
    """All runs.

    Args:
      scale: "laptop" or "paper".
      texts: by name, their keys of the config.

    Raises:
      InputError: if there is none.
    """
    return [
        training(scale, text, keys, variant, seed, optimizer__beta2=beta2)
        for text, keys in some_text(texts).items()
        for variant in ("baseline", "ode")
        for beta2 in (0.95, 0.999)
        for seed in SEEDS
    ]
