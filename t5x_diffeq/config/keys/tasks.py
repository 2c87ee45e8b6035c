"""`config.tasks`: tasks of lm-evaluation-harness while the model trains."""

from dataclasses import dataclass
from functools import partial

from t5x_diffeq.config.keys.key import (
    CountOrNone,
    Section,
    Size,
    SizeOrNone,
    TextOrNone,
    Texts,
    key,
)

_key = partial(key, resume=True, finetune=True)


@dataclass(frozen=True)
class TasksKeys(Section):
    """`config.tasks`: tasks of lm-evaluation-harness while the model trains."""

    section = "tasks"
    names: Texts = _key(
        (),
        """the tasks of lm-evaluation-harness to run while the model trains, such as
        `("lambada_openai", "piqa")`. `("paper",)`: the paper's eleven. `()`: no tasks""",
    )
    every: Size = _key(
        5000, "optimizer steps between runs of the tasks, which also run after the last step"
    )
    num_fewshot: CountOrNone = _key(None, "examples in the context. `None`: the task's own number")
    limit: SizeOrNone = _key(None, "number of documents of each task, from the first. `None`: all")
    include_path: TextOrNone = _key(None, "a folder with task files of your own")
