"""The base class of experiments: the runs, and what is shown of their outcomes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from t5x_diffeq.experiments.present import Chart, TableSpec
from t5x_diffeq.experiments.runs import ExperimentRun
from t5x_diffeq.runtime.errors import InputError
from t5x_diffeq.runtime.files import AnyPath

Keys = Mapping[str, Any]  # values by key of the config
Texts = Mapping[str, Keys]  # by the text's name, the keys of the config for it


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """Runs, and the tables and figures made from their outcomes.

    Attributes:
      tables: the tables, each with its figure.
      seeds: number of seeds of each training: the default of --seeds.
    """

    tables: tuple[TableSpec, ...] = ()
    seeds: int = 3

    def runs(
        self, texts: Texts, seeds: Sequence[int], done: dict[str, dict]
    ) -> list[ExperimentRun]:
        """All runs, or those that can be known from the outcomes so far.

        Args:
          texts: the texts to train on.
          seeds: seeds of the trainings.
          done: outcomes so far, by the name of their run.

        Raises:
          InputError: if there are too few texts, or too many.
        """
        raise NotImplementedError

    def notes(self, outcomes: Sequence[dict], output: AnyPath) -> list[str]:
        """Further paragraphs in Markdown, shown after the tables.

        Args:
          outcomes: outcomes of the runs that have labels.
          output: the folder of the runs.
        """
        return []

    def charts(self, outcomes: Sequence[dict], output: AnyPath) -> dict[str, Chart]:
        """Further figures, by the name of their file; the arguments are those of `notes`."""
        return {}


def need_text(texts: Texts) -> None:
    """Checks that there is a text.

    Raises:
      InputError: if there is none.
    """
    if not texts:
        raise InputError("this experiment needs a text: --text=NAME=PATH, or --text=stdlib")
