"""What every experiment has: its runs, and what is shown of their outcomes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from t5x_diffeq.experiments.present import Layout
from t5x_diffeq.experiments.runs import Run
from t5x_diffeq.runtime.errors import InputError
from t5x_diffeq.runtime.files import AnyPath

Keys = Mapping[str, Any]  # values by key of the config
Texts = Mapping[str, Keys]  # by the text's name, its keys of the config


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """Runs, and the tables and figures that are made of their outcomes.

    Attributes:
      layouts: the tables, each with its figure.
      seeds: how many seeds each training has, unless --seeds says otherwise.
    """

    layouts: tuple[Layout, ...] = ()
    seeds: int = 3

    def runs(self, texts: Texts, seeds: Sequence[int], done: dict[str, dict]) -> list[Run]:
        """All runs, or as many as the outcomes of those that are done determine.

        Args:
          texts: what to train on.
          seeds: of the trainings.
          done: outcomes by the name of their run.

        Raises:
          InputError: if there are too few texts, or too many.
        """
        raise NotImplementedError

    def notes(self, outcomes: Sequence[dict], output: AnyPath) -> list[str]:
        """Further paragraphs in Markdown, shown after the tables.

        Args:
          outcomes: of the runs that have labels.
          output: the folder of the runs.
        """
        return []


def need_text(texts: Texts) -> None:
    """There is a text.

    Raises:
      InputError: if not.
    """
    if not texts:
        raise InputError("this experiment needs a text: --text=NAME=PATH, or --text=stdlib")
