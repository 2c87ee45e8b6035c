"""Tasks of lm-evaluation-harness while a model trains: `config.tasks`."""

import importlib.util

from ml_collections import ConfigDict

from t5x_diffeq.data.tokenizer import Tokenizer
from t5x_diffeq.runtime.errors import InputError
from t5x_diffeq.training.setup import Setup


def check_harness(asked_by: str) -> None:
    """The harness is installed.

    Raises:
      InputError: if not; `asked_by` is what needs it.
    """
    if not importlib.util.find_spec("lm_eval"):
        raise InputError(
            f"{asked_by} needs the package lm_eval; pip install -e '.[eval]', or leave it out"
        )


class Downstream:
    """The tasks that a config names, loaded once; false if it names none.

    Args:
      tasks: `config.tasks`.

    Raises:
      InputError: naming a key, if one can't be used.
    """

    def __init__(self, tasks: ConfigDict):
        self.every, self.tasks = tasks.every, None
        if not tasks.names:
            return
        check_harness("tasks.names")
        from t5x_diffeq.inference import harness

        self.harness = harness
        self.tasks = harness.load_tasks(
            tasks.names, tasks.num_fewshot, tasks.include_path, tasks.limit, "tasks.names"
        )

    def __bool__(self) -> bool:
        return self.tasks is not None

    def run(
        self, setup: Setup, params: dict, tokenizer: Tokenizer, batch_size: int
    ) -> dict[str, float]:
        """`tasks/piqa/acc` and the like of a model as it is; the table is shown.

        Args:
          setup: of the run.
          params: the model's parameters.
          tokenizer: the run's.
          batch_size: sequences of the model's length that go through it at once.
        """
        assert self.tasks is not None  # callers ask first whether there are tasks
        return self.harness.evaluate(setup, params, tokenizer, batch_size, self.tasks)
