"""Tasks of lm-evaluation-harness while a model trains: `config.tasks`."""

from functools import cache
from typing import TYPE_CHECKING, ClassVar

from t5x_diffeq.config.config import Config, TasksKeys
from t5x_diffeq.model.sub_fields import need_methods
from t5x_diffeq.system.extras import need_package
from t5x_diffeq.training.goodput import EVALUATION
from t5x_diffeq.training.hooks import Hook, LoopPosition, Training
from t5x_diffeq.training.setup import Setup

if TYPE_CHECKING:
    from t5x_diffeq.inference.harness import Tasks


@cache
def _load(tasks: TasksKeys) -> "Tasks":
    from t5x_diffeq.inference.harness import load_tasks  # lm_eval takes seconds to import

    return load_tasks(
        tasks.names, tasks.num_fewshot, tasks.include_path, tasks.limit, "tasks.names"
    )


class DownstreamTasks(Hook):
    """Runs the tasks that a config names: `tasks/piqa/acc` and the like."""

    name: ClassVar[str] = "tasks"
    activity: ClassVar[str] = EVALUATION
    runs_at_0: ClassVar[bool] = False
    runs_later: ClassVar[bool] = True

    def __init__(self, training: Training):
        tasks = training.config.tasks
        super().__init__(training, tasks.every if tasks.names else None)

    @classmethod
    def check(cls, config: Config, setup: Setup) -> None:
        """Loads the tasks; checks that the model's block supports them."""
        if config.tasks.names:
            need_package("lm_eval", "tasks.names", "leave it out")
            need_methods(setup.model.config, _load(config.tasks).methods)

    def run(self, position: LoopPosition) -> dict[str, float]:
        """The tasks' metrics; their table is printed."""
        from t5x_diffeq.inference.harness import score_tasks

        training = self.training
        return score_tasks(
            training.setup,
            position.state.params,
            training.corpus.tokenizer,
            training.config.train.eval_batch_size,
            _load(training.config.tasks),
            training.stop.interruptible,
        )
