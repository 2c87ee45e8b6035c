"""Models at their best learning rates, after equal steps and in equal time."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from t5x_diffeq.experiments.drawing import losses_over_steps
from t5x_diffeq.experiments.experiment import Texts
from t5x_diffeq.experiments.learning_rates import RATE, RATE_NAME, Sweep
from t5x_diffeq.experiments.present import Chart, Line, TableSpec
from t5x_diffeq.experiments.runs import ExperimentRun, format_flags
from t5x_diffeq.runtime.config_files import values_of
from t5x_diffeq.runtime.files import AnyPath

_BASELINE = "baseline"
_RATIO = "model / baseline: step_ms"
_EQUAL_STEPS = "equal steps"
_BY_MODEL = TableSpec((), "model", "loss", RATE_NAME)


@dataclass(frozen=True, kw_only=True)
class EqualTime(Sweep):
    """A sweep of the learning rate, then each model at its best in the time of the baseline.

    The steps of each model are timed in turns with those of a baseline that has its keys. A model
    whose step takes r times as long, r > 1, then trains for 1 / r of the steps, with a schedule of
    that length. If r is at most 1, equal steps are no more than equal time, and stand for it.

    Attributes:
      config: the config's file.
      rounds: rounds of the timing.
    """

    config: str
    rounds: int = 20
    tables: tuple[TableSpec, ...] = (
        TableSpec(("text", "budget"), "model", "loss", RATE_NAME, over_steps=True),
        TableSpec(("text", "budget"), "model", "perplexity", RATE_NAME),
        TableSpec(("text", "model"), RATE_NAME, "loss", log=True),
    )

    def runs(
        self, texts: Texts, seeds: Sequence[int], done: dict[str, dict]
    ) -> list[ExperimentRun]:
        """The runs that the outcomes so far determine."""
        timed = {name: self._timing(name) for name in self.models if not self._is_baseline(name)}
        swept, best = self.progress(texts, seeds, done)
        made = [*timed.values(), *_with_budget(swept, _EQUAL_STEPS)]
        if not best or any(run.name not in done for run in timed.values()):
            return made
        steps = values_of(self.config, _BASELINE)["train.total_steps"]
        for (text, name), rate in best.items():
            ratio = done[timed[name].name][_RATIO] if name in timed else 1.0
            fewer = round(steps / max(ratio, 1.0))
            choice = {RATE: rate, "train.total_steps": fewer}
            again = [self.training(texts, (text, name), choice, seed) for seed in seeds]
            made += _with_budget(again, "equal time") if fewer != steps else []
        return made

    def charts(self, outcomes: Sequence[dict], output: AnyPath) -> dict[str, Chart]:
        """The loss of each model at its best rate over time: a panel for each text."""
        ratios = {each["run"]: each[_RATIO] for each in outcomes if _RATIO in each}
        of_texts: dict[str, list[dict]] = {}
        for each in outcomes:
            if each.get("budget") == _EQUAL_STEPS:
                of_texts.setdefault(each["text"], []).append(each)

        def over_time(text: str) -> dict[str, Line]:
            lines = losses_over_steps(of_texts[text], _BY_MODEL, output)
            scale = {name: ratios.get(self._timing(name).name, 1.0) for name in lines}
            return {
                name: [(step * scale[name], *loss) for step, *loss in line if step]
                for name, line in lines.items()
            }

        panels = {text: over_time(text) for text in of_texts}
        across = "time, in optimizer steps of the baseline"
        return {"loss_over_time": Chart(across, "validation loss", panels)} if panels else {}

    def _is_baseline(self, name: str) -> bool:
        return self.models[name].variant == _BASELINE

    def _timing(self, name: str) -> ExperimentRun:
        """The times of a model and of the baseline with the same keys."""
        model = self.models[name]
        config = f"configs/{self.config}:{model.variant}"
        return ExperimentRun(
            "-".join(("timing", self.config.removesuffix(".py"), *name.split())),
            "benchmark",
            (f"--config={config}", f"--rounds={self.rounds}", *format_flags(model.keys)),
        )


def _with_budget(runs: Sequence[ExperimentRun], budget: str) -> list[ExperimentRun]:
    return [replace(run, labels={**run.labels, "budget": budget}) for run in runs]
