"""Tables 4 and 5 with small models: tasks that are made of each model's own validation text.

    python -m studies.own_tasks --text=shakespeare=tinyshakespeare.txt

The models of this size know nothing of the paper's eleven tasks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from studies.paired import paired_table
from studies.study import run_study
from t5x_diffeq.experiments.experiment import Experiment, trainings
from t5x_diffeq.experiments.follow_ups import follow
from t5x_diffeq.experiments.present import TableSpec
from t5x_diffeq.experiments.runs import ExperimentRun
from t5x_diffeq.system.files import AnyPath

_MODELS = ("baseline", "euler", "ode", "shared")


def ask_texts_tasks(trained: ExperimentRun) -> list[ExperimentRun]:
    """Makes the two tasks of the run's text, then evaluates the model on them."""
    tasks = follow(trained, "studies.make_tasks", "tasks")
    arguments = ("--tasks=own_ending,last_word", f"--include_path={{output}}/{tasks.name}")
    return [replace(tasks, labels={}), follow(trained, "evaluate", "asked", *arguments, shots=0)]


@dataclass(frozen=True, kw_only=True)
class OwnTasks(Experiment):
    """Trainings whose models answer the same questions."""

    def notes(self, outcomes: Sequence[dict], output: AnyPath) -> list[str]:
        """The paired tests, after the notes that every experiment has."""
        return [*super().notes(outcomes, output), *paired_table(outcomes, output)]


LAPTOP = PAPER = OwnTasks(
    trainings=trainings(_MODELS, {"model.architecture": ("gpt", "llama")}),
    follow_up=ask_texts_tasks,
    tables=(TableSpec(("text", "architecture", "task", "shots"), "model", "score"),),
)

if __name__ == "__main__":
    run_study("own_tasks", __doc__, LAPTOP, PAPER)
