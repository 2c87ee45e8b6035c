"""Tasks of lm-evaluation-harness while a model trains: `config.tasks`."""

import importlib.util
from collections.abc import Callable

from t5x_diffeq.data.tokenizer import Tokenizer
from t5x_diffeq.models.config import ModelConfig
from t5x_diffeq.models.sub_fields import need_hooks
from t5x_diffeq.runtime.config import TasksKeys
from t5x_diffeq.runtime.errors import InputError
from t5x_diffeq.training.setup import Setup


def check_harness(asked_by: str) -> None:
    """Checks that lm-evaluation-harness is installed.

    Raises:
      InputError: if it is not installed, naming `asked_by`, the flag or key that needs it.
    """
    if not importlib.util.find_spec("lm_eval"):
        raise InputError(
            f"{asked_by} needs the package lm_eval; pip install -e '.[eval]', or leave it out"
        )


class DownstreamTasks:
    """The tasks that a config names, loaded once; falsy if it names none.

    Args:
      tasks: `config.tasks`.

    Raises:
      InputError: if the value of a key can't be used, naming the key.
    """

    def __init__(self, tasks: TasksKeys):
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

    def check(self, model: ModelConfig) -> None:
        """Checks that the model's block can do what the tasks need.

        Raises:
          InputError: if it can't, naming the method that it lacks.
        """
        if self.tasks is not None:
            need_hooks(model, self.tasks.hooks)

    def run(
        self,
        setup: Setup,
        params: dict,
        tokenizer: Tokenizer,
        batch_size: int,
        interruptible: Callable,
    ) -> dict[str, float]:
        """Runs the tasks; returns `tasks/piqa/acc` and the like, and prints the table.

        Args:
          setup: the run's setup.
          params: the model's parameters.
          tokenizer: the run's tokenizer.
          batch_size: sequences of the model's full length per batch.
          interruptible: yields the batches that it is given, or raises (see `StopSignals`).
        """
        assert self.tasks is not None  # callers check first that there are tasks
        return self.harness.score_tasks(
            setup, params, tokenizer, batch_size, self.tasks, interruptible
        )
