"""Figures 15, 16 and table 6 of the paper: time, memory and parameters against T."""

from dataclasses import dataclass

from t5x_diffeq.experiments.comparison import Keys
from t5x_diffeq.experiments.present import Layout
from t5x_diffeq.experiments.runs import Run, flags

VALUES = (
    *(f"model / baseline: {ratio}" for ratio in ("step_ms", "temporary_bytes", "state_bytes")),
    "model: parameters",
)


@dataclass(frozen=True)
class Cost:
    """The step of the ODE model against its baseline's, in turns, for each T."""

    layouts: tuple[Layout, ...] = tuple(Layout(("config",), "T", value) for value in VALUES)

    def runs(self, scale: str, texts: dict[str, Keys], done: dict[str, dict]) -> list[Run]:
        """All runs; they need no text."""
        config = "configs/laptop.py" if scale == "laptop" else "configs/gpt_small.py"
        return [
            Run(
                f"cost-T={T}",
                "benchmark",
                (f"--config={config}", *flags({"model.time_embed_dim": T})),
                {"config": config, "T": T},
            )
            for T in (20, 48, 96, 144)
        ]
