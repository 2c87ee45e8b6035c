"""Does W(t) compress a trained GPT over depth? Beside nested layers, and layers left out.

    python -m studies.compression --text=stdlib

A GPT of twelve layers is trained, then given six or three sets of layer weights in four ways
(`studies.compressed`), and each result is tuned for a fifth of the GPT's optimizer steps with the
GPT as its teacher. Models with as many sets have as many parameters; those with fewer layers do
fewer FLOPs. Every model has the best rate of its sweep, and none has weight decay.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from studies.study import lengthened, run_study
from t5x_diffeq.config.config_files import project_config
from t5x_diffeq.experiments.experiment import RATE_NAME, Keys, Sweep, Texts, Trainee
from t5x_diffeq.experiments.present import TableSpec
from t5x_diffeq.experiments.runs import ExperimentRun, Label, format_flags

_LAYERS = 12
_KINDS = {  # by kind, its name in tables and the variant of configs/finetune.py that tunes it
    "ode": ("W(t)", "hypernetwork"),
    "nested": ("nested layers", "hypernetwork"),
    "averaged": ("nested layers, averaged", "hypernetwork"),
    "dropped": ("fewer layers", "full"),
}
_SHARE = 0.2  # of the GPT's optimizer steps, for tuning


@dataclass(frozen=True)
class _Student(Trainee):
    """A compressed GPT that is tuned: its run, and those that must come before it."""

    kind: str = "ode"
    sets: int = 6
    width: int = 32
    gpt: Trainee = field(default_factory=lambda: Trainee("baseline"))

    def run(self, text: str, text_keys: Keys, seed: int) -> ExperimentRun:
        """Its tuning."""
        compressed = self.before(text, text_keys, seed)[-1]
        gpt, rate = self.gpt.run(text, text_keys, seed), float(self.keys[f"optimizer.{RATE_NAME}"])
        data = {key: value for key, value in text_keys.items() if key.startswith("data.")}
        steps = int(_SHARE * int(gpt.labels["total_steps"]))
        keys = {
            "train.total_steps": steps,
            "train.batch_size": self.width // 2,
            "train.eval_every": steps,
            "train.checkpoint_every": steps,
            "train.eval_batch_size": 64,
            "train.eval_batches": 32,
            "train.eval_all_at_end": False,
            "optimizer.decay": "kernels",
            "optimizer.weight_decay": 0.0,
            **self.keys,
            **data,
            "seed": seed,
        }
        arguments = (
            f"--config={project_config('finetune.py')}:{_KINDS[self.kind][1]}",
            f"--config.init_from={{output}}/{compressed.name}",
            f"--config.train.distill_from={{output}}/{gpt.name}",
            "--trust_plugins",
            *format_flags(keys),
        )
        labels: dict[str, Label] = {"text": text, "model": self.name, "seed": seed, RATE_NAME: rate}
        name = f"{compressed.name}-rate={rate}"
        return ExperimentRun(name, "finetune", arguments, labels, compressed.name)

    def before(self, text: str, text_keys: Keys, seed: int) -> list[ExperimentRun]:
        """The training of the GPT, and its compression."""
        gpt = self.gpt.run(text, text_keys, seed)
        name = f"compressed-{text}-{self.kind}-{self.width}-sets={self.sets}-seed={seed}"
        arguments = (
            f"--workdir={{output}}/{gpt.name}",
            f"--output={{output}}/{name}",
            f"--kind={self.kind}",
            f"--sets={self.sets}",
            "--trust_plugins",
        )
        labels: dict[str, Label] = {
            "text": text,
            "model": f"{self.name}, not tuned",
            "seed": seed,
            RATE_NAME: 0.0,
        }
        compressed = ExperimentRun(name, "studies.compressed", arguments, labels, gpt.name)
        return [replace(gpt, labels={**gpt.labels, "model": f"GPT, {self.width}"}), compressed]


@dataclass(frozen=True, kw_only=True)
class _Compression(Sweep):
    """A sweep in which the runs before each student's come first."""

    tables: tuple[TableSpec, ...] = (TableSpec(("model",), "text", "loss", RATE_NAME),)

    def runs(
        self, texts: Texts, seeds: Sequence[int], done: dict[str, dict]
    ) -> list[ExperimentRun]:
        """The runs that the outcomes so far determine, each after those that it needs."""
        needed = {
            each.name: each
            for text in texts
            for seed in seeds
            for training in self.trainings
            if isinstance(training, _Student)
            for each in training.before(text, texts[text], seed)
        }
        ordered: dict[str, ExperimentRun] = {}
        for run in super().runs(texts, seeds, done):
            compressed = needed[str(run.needs)]
            for each in (needed[str(compressed.needs)], compressed, run):
                ordered[each.name] = each
        return list(ordered.values())


def _study(widths: tuple[int, ...], length: float) -> _Compression:
    students = []
    for width in widths:
        gpt = Trainee(
            f"baseline-{width}",
            {
                "optimizer.name": "muon",
                "optimizer.weight_decay": 0.1,
                "optimizer.learning_rate": 1.6e-2,
                "train.velocity_penalty": 0.0,
                "model.num_steps": _LAYERS,
                **lengthened(length),
            },
            config="ladder.py",
        )
        students += [
            _Student(
                kind,
                model=f"{name}, {sets} sets, {width}",
                rates=(2e-3, 1e-3, 4e-3),
                kind=kind,
                sets=sets,
                width=width,
                gpt=gpt,
            )
            for sets in (6, 3)
            for kind, (name, _) in _KINDS.items()
        ]
    return _Compression(trainings=tuple(students))


LAPTOP = _study((32, 48), 1.0)
PAPER = _study((96, 144), 2.0)

if __name__ == "__main__":
    run_study("compression", __doc__, LAPTOP, PAPER)
