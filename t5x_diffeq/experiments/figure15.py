"""Figures 15, 16 and table 6 of the paper: time, memory and parameters against T."""

from t5x_diffeq.experiments.present import Layout
from t5x_diffeq.experiments.runs import Run, flags

WIDTHS = (20, 48, 96, 144)
VALUES = (
    *(f"model / baseline: {ratio}" for ratio in ("step_ms", "temporary_bytes", "state_bytes")),
    "model: parameters",
)
LAYOUTS = tuple(Layout(row=("against the baseline",), column="T", value=value) for value in VALUES)


def runs(scale: str, texts: dict[str, dict[str, object]]) -> list[Run]:
    """All runs; they need no text.

    Args:
      scale: "laptop" or "paper".
      texts: not read.
    """
    config = "configs/laptop.py" if scale == "laptop" else "configs/gpt_small.py"
    return [
        Run(
            f"T={T}",
            "benchmark",
            (f"--config={config}", *flags({"model.time_embed_dim": T})),
            {"against the baseline": config, "T": T},
        )
        for T in WIDTHS
    ]
