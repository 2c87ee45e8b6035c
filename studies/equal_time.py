"""ODE, compact ODE, baseline and shared weights at their best learning rates, in equal time.

The models are compared after equal steps, too, and at a laptop's scale also with a penalty on the
velocity. The batch is one at which a step of the ODE takes about the baseline's time
(configs/workstation.py). The steps are timed first; meanwhile no other work should run.

    python -m studies.equal_time --text=stdlib --text=shakespeare=tinyshakespeare.txt
    python -m studies.equal_time --scale=paper --text=openwebtext=stream:Skylion007/openwebtext
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from studies.study import run_study
from t5x_diffeq.config.config_files import values_of
from t5x_diffeq.experiments.experiment import RATE_NAME, Sweep, Texts, Trainee, at_rate
from t5x_diffeq.experiments.present import TableSpec
from t5x_diffeq.experiments.runs import ExperimentRun, format_flags

_RATIO = "model / baseline: step_ms"
_WORKSTATION, _SMALL = "workstation.py", "gpt_small.py"
_PENALTY = {"train.velocity_penalty": 0.1}


@dataclass(frozen=True, kw_only=True)
class EqualTime(Sweep):
    """A sweep of the learning rate, then each model at its best rate in the baseline's time.

    The steps of each model and of a baseline with the same keys are timed in turns. A model whose
    step takes r times as long, r > 1, then trains for 1 / r of the steps, with a schedule of that
    length. If r is at most 1, equal steps take no more than equal time, so nothing more is trained.

    Attributes:
      config: the config's file.
    """

    config: str
    tables: tuple[TableSpec, ...] = (
        TableSpec(("text", "budget"), "model", "loss", RATE_NAME, over_steps=True),
        TableSpec(("text", "budget"), "model", "perplexity", RATE_NAME),
        TableSpec(("text", "model"), RATE_NAME, "loss", log=True, same_seeds=True),
    )

    def runs(
        self, texts: Texts, seeds: Sequence[int], done: dict[str, dict]
    ) -> list[ExperimentRun]:
        """The runs that the outcomes so far determine."""
        timings = self._timings()
        swept, best = self.progress(texts, seeds, done)
        runs = [*timings.values(), *_with_budget(swept, "equal steps")]
        if not best or any(run.name not in done for run in timings.values()):
            return runs
        steps = values_of(self.config, "baseline")["train.total_steps"]
        models = {training.name: training for training in self.trainings}
        for (text, name), rate in best.items():
            ratio = done[timings[name].name][_RATIO] if name in timings else 1.0
            fewer = round(steps / max(ratio, 1.0))
            if fewer != steps:
                shorter = at_rate(models[name], rate)
                shorter = replace(shorter, keys={**shorter.keys, "train.total_steps": fewer})
                again = [shorter.run(text, texts[text], seed) for seed in seeds]
                runs += _with_budget(again, "equal time")
        return runs

    def _timings(self) -> dict[str, ExperimentRun]:
        """By model, the run that times its steps and the steps of a baseline with the same keys."""
        size, timings = self.config.removesuffix(".py"), {}
        for training in self.trainings:
            if training.variant != "baseline":
                name = "-".join(("timing", size, *training.name.split()))
                config = f"--config=configs/{self.config}:{training.variant}"
                arguments = (config, *format_flags(training.keys))
                timings[training.name] = ExperimentRun(name, "benchmark", arguments)
        return timings


def _with_budget(runs: Sequence[ExperimentRun], budget: str) -> list[ExperimentRun]:
    return [replace(run, labels={**run.labels, "budget": budget}) for run in runs]


LAPTOP = EqualTime(
    config=_WORKSTATION,
    trainings=(
        *(
            Trainee(variant, config=_WORKSTATION, rates=(2e-3, 4e-3))
            for variant in ("baseline", "ode", "shared", "compact", "smooth")
        ),
        Trainee("baseline", _PENALTY, "baseline with penalty", _WORKSTATION, (1e-3, 2e-3)),
        Trainee("compact", _PENALTY, "compact with penalty", _WORKSTATION, (2e-3, 4e-3)),
    ),
)
PAPER = EqualTime(
    config=_SMALL,
    trainings=tuple(
        Trainee(variant, config=_SMALL, rates=(3e-4, 6e-4, 1.2e-3))
        for variant in ("ode", "baseline", "compact", "smooth")
    ),
    seeds=1,
)

if __name__ == "__main__":
    run_study("equal_time", __doc__, LAPTOP, PAPER)
