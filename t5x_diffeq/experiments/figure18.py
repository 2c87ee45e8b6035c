"""Figure 18 of the paper: one time embedding for all kernels (appendix D.2), or one for each."""

from t5x_diffeq.experiments.comparison import SEEDS, some_text, training
from t5x_diffeq.experiments.present import Layout
from t5x_diffeq.experiments.runs import Run

LAYOUTS = (Layout(row=("text", "time_embedding"), column="time_embed_dim", value="loss"),)


def runs(scale: str, texts: dict[str, dict[str, object]]) -> list[Run]:
    """All runs.

    Args:
      scale: "laptop" or "paper".
      texts: by name, their keys of the config.

    Raises:
      InputError: if there is none.
    """
    return [
        training(
            scale, text, keys, "ode", seed, model__time_embedding=kind, model__time_embed_dim=T
        )
        for text, keys in some_text(texts).items()
        for kind in ("per_layer", "shared")
        for T in (48, 96)
        for seed in SEEDS
    ]
