"""Tables 4 and 5 of the paper (appendix C.7): trained models on lm-evaluation-harness's tasks."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from t5x_diffeq.experiments.comparison import laptop_config, make_training
from t5x_diffeq.experiments.experiment import Experiment, Keys, Texts, need_text
from t5x_diffeq.experiments.paired import paired_table
from t5x_diffeq.experiments.present import TableSpec
from t5x_diffeq.experiments.runs import ExperimentRun
from t5x_diffeq.runtime.files import AnyPath


@dataclass(frozen=True, kw_only=True)
class TaskScores(Experiment):
    """The paper's eleven tasks, zero-shot and five-shot; on a laptop, the text's own two tasks.

    Figures 9 to 12 show the same numbers. A score is followed by its standard error over seeds
    after ±, if there are several, and the harness's over documents in brackets, then a paired test.

    Attributes:
      config: config of the trainings; None for the text's own laptop config and own tasks.
      variants: variants of the config.
      keys: keys of the config that all trainings set.
    """

    config: str | None = None
    variants: tuple[str, ...]
    keys: Keys = field(default_factory=dict)
    tables: tuple[TableSpec, ...] = (TableSpec(("text", "task", "shots"), "model", "score"),)

    def runs(
        self, texts: Texts, seeds: Sequence[int], done: dict[str, dict]
    ) -> list[ExperimentRun]:
        """All runs: each training, then its tasks."""
        need_text(texts)
        made = []
        for text, keys in texts.items():
            config = self.config or laptop_config(text)
            for variant in self.variants:
                for seed in seeds:
                    trained = make_training(config, text, keys, variant, self.keys, seed)
                    asked = _papers_tasks(trained) if self.config else _own_tasks(trained)
                    made += [replace(trained, labels={}), *asked]
        return made

    def notes(self, outcomes: Sequence[dict], output: AnyPath) -> list[str]:
        """The paired test of ODE against baseline over the documents of each task."""
        answers = [
            {**outcome, "documents": _read_documents(output / outcome["run"])}
            for outcome in outcomes
            if "task" not in outcome
        ]
        return [paired_table([each for each in answers if each["documents"]])]


def _tasks_run(trained: ExperimentRun, name: str, shots: int, *arguments: str) -> ExperimentRun:
    folders = (f"--workdir={{output}}/{trained.name}", f"--output={{output}}/{name}")
    labels = {**trained.labels, "shots": shots}
    return ExperimentRun(name, "evaluate", (*folders, *arguments), labels, trained.name)


def _own_tasks(trained: ExperimentRun) -> list[ExperimentRun]:
    needs = trained.name
    tasks = f"{needs}-tasks"
    folder = f"{{output}}/{tasks}"
    made = (f"--workdir={{output}}/{needs}", f"--output={folder}")
    arguments = ("--tasks=own_ending,last_word", f"--include_path={folder}")
    return [
        ExperimentRun(tasks, "make_tasks", made, {}, needs),
        _tasks_run(trained, f"{needs}-asked", 0, *arguments),
    ]


def _papers_tasks(trained: ExperimentRun) -> list[ExperimentRun]:
    return [
        _tasks_run(
            trained,
            f"{trained.name}-{shots}-shot",
            shots,
            "--tasks=paper",
            f"--num_fewshot={shots}",
        )
        for shots in (0, 5)
    ]


def _read_documents(folder: AnyPath) -> dict[str, list[float]]:
    """Each task's accuracies by document, from the newest JSON of `evaluate`; {} if it has none."""
    files = sorted(folder.glob("*.json"), key=lambda path: path.name.rpartition("-")[2])
    return json.loads(files[-1].read_text()).get("documents", {}) if files else {}
