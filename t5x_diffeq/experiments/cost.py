"""Figures 15, 16 and table 6 of the paper: time, memory and parameters against T."""

from collections.abc import Sequence
from dataclasses import dataclass

from t5x_diffeq.experiments.experiment import Experiment, Texts
from t5x_diffeq.experiments.present import TableSpec
from t5x_diffeq.experiments.runs import ExperimentRun, format_flags

WIDTHS = (20, 48, 72, 96, 120, 144)  # the values of T in table 6
_VALUES = (
    *(f"model / baseline: {ratio}" for ratio in ("step_ms", "temporary_bytes", "state_bytes")),
    "model: parameters",
)


@dataclass(frozen=True, kw_only=True)
class Cost(Experiment):
    """The ODE model's optimizer step against its baseline's, timed alternately, for each T.

    Attributes:
      config: the config's file, such as "gpt_medium.py".
      widths: the values of T.
    """

    config: str
    widths: tuple[int, ...]
    tables: tuple[TableSpec, ...] = tuple(TableSpec(("config",), "T", value) for value in _VALUES)
    seeds: int = 1

    def runs(
        self, texts: Texts, seeds: Sequence[int], done: dict[str, dict]
    ) -> list[ExperimentRun]:
        """All runs; they need no text and have no seed."""
        config = f"configs/{self.config}"
        return [
            ExperimentRun(
                f"cost-T={T}",
                "benchmark",
                (f"--config={config}", *format_flags({"model.time_embed_dim": T})),
                {"config": config, "T": T},
            )
            for T in self.widths
        ]
