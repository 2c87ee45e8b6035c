"""Tables 4 and 5 of the paper (appendix C.7): trained models on lm-evaluation-harness's tasks."""

from dataclasses import dataclass, replace

from t5x_diffeq.experiments.comparison import SEEDS, Keys, config_for, need_text, training
from t5x_diffeq.experiments.present import Layout
from t5x_diffeq.experiments.runs import Run

VARIANTS = ("baseline", "ode", "shared")


@dataclass(frozen=True)
class TaskScores:
    """The paper's eleven tasks with no and with five examples; on a laptop, the text's own two.

    Attributes:
      config: of the trainings at the paper's scale, such as "gpt_large.py".
      architecture: of the block on a laptop.
    """

    config: str
    architecture: str
    layouts: tuple[Layout, ...] = (Layout(("text", "task", "shots"), "model", "score"),)

    def runs(self, scale: str, texts: dict[str, Keys], done: dict[str, dict]) -> list[Run]:
        """All runs: each training, then its tasks. As `Comparison.runs`."""
        need_text(texts)
        laptop, made = scale == "laptop", []
        for text, keys in texts.items():
            config = config_for(scale, text) if laptop else self.config
            block = {"model.architecture": self.architecture} if laptop else {}
            for variant in VARIANTS:
                for seed in SEEDS if laptop else SEEDS[:1]:
                    trained = training(config, text, keys, variant, block, seed)
                    made += [
                        replace(trained, labels={}),
                        *(own_tasks(trained) if laptop else papers_tasks(trained)),
                    ]
        return made


def own_tasks(trained: Run) -> list[Run]:
    """The tasks of a run's own text, made and asked."""
    needs, labels = trained.name, {**trained.labels, "shots": 0}
    tasks = f"{needs}-tasks"
    workdir, folder = f"--workdir={{output}}/{needs}", f"{{output}}/{tasks}"
    arguments = ("--tasks=own_ending,last_word", f"--include_path={folder}")
    return [
        Run(tasks, "make_tasks", (workdir, f"--output={folder}"), {}, needs),
        Run(f"{needs}-asked", "evaluate", (workdir, *arguments), labels, needs),
    ]


def papers_tasks(trained: Run) -> list[Run]:
    """The paper's, without and with five examples."""
    needs = trained.name
    return [
        Run(
            f"{needs}-{shots}-shot",
            "evaluate",
            (f"--workdir={{output}}/{needs}", "--tasks=paper", f"--num_fewshot={shots}"),
            {**trained.labels, "shots": shots},
            needs,
        )
        for shots in (0, 5)
    ]
