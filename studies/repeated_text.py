"""Little text, many passes: are W(t)'s many parameters worth something with strong weight decay?

    python -m studies.repeated_text --text=shakespeare=tinyshakespeare.txt

Over-parametrised models with strong decay win on fixed data (arXiv 2509.14786), and `:ode` has
eight times GPT's parameters at equal FLOPs. Models of width 32 read 250 kB of text 18 times; at the
larger scale, models of width 64 read 1 MB, as many bytes for each parameter of GPT. The first seed
tries weight decays for each model, then learning rates at its best decay, and goes on until neither
optimum is at an end of the values tried. The lowest validation loss of a training decides, as if
all stopped early. Name a text of half the size, too, to see where the lead goes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from studies.study import run_study
from t5x_diffeq.experiments.experiment import RATE_NAME, Keys, Sweep, Texts, Trainee, at_rate
from t5x_diffeq.experiments.present import TableSpec
from t5x_diffeq.experiments.runs import ExperimentRun

_DECAY, _RATE = "optimizer.weight_decay", f"optimizer.{RATE_NAME}"
_DECAYS, _FIRST_RATE = (0.1, 0.5, 1.5), 1.6e-2
_PASSES = 18
_BYTES = {32: 250_000, 64: 1_000_000}  # of training text, by width
_MODELS: dict[str, tuple[str, Keys]] = {
    "GPT": ("baseline", {}),
    "GPT, dropout 0.1": ("baseline", {"model.dropout_rate": 0.1}),
    "GPT, Euler's scheme": ("euler", {}),
    "ode": ("ode", {}),
    "compact": ("compact", {}),
}


@dataclass(frozen=True, kw_only=True)
class DecayThenRate(Sweep):
    """A sweep of the weight decay at one learning rate, then of the rate at the best decay."""

    decides: str = "lowest"
    tables: tuple[TableSpec, ...] = (
        TableSpec(("text", "model"), "weight_decay", "lowest", RATE_NAME, same_seeds=True),
        TableSpec(("text", "model"), RATE_NAME, "lowest", "weight_decay", log=True),
    )

    def runs(
        self, texts: Texts, seeds: Sequence[int], done: dict[str, dict]
    ) -> list[ExperimentRun]:
        """The runs that the outcomes so far determine."""
        models = {each.name: at_rate(each, _FIRST_RATE) for each in self.trainings}
        of_decay = Sweep(trainings=tuple(models.values()), key=_DECAY, decides=self.decides)
        runs, decays = of_decay.progress(texts, seeds[:1], done)
        for (text, name), decay in decays.items():
            training = at_rate(models[name], decay, _DECAY)
            of_rate = Sweep(trainings=(training,), decides=self.decides)
            rates = {(text, name): (_FIRST_RATE / 2, _FIRST_RATE, 2 * _FIRST_RATE)}
            runs += of_rate.progress({text: texts[text]}, seeds, done, rates)[0]
        return list({run.name: run for run in runs}.values())


def _sweep(width: int) -> DecayThenRate:
    tokens_per_step = width // 2 * 128  # of configs/ladder.py
    steps = _PASSES * _BYTES[width] // tokens_per_step
    every: Keys = {
        "optimizer.name": "muon",
        "train.total_steps": steps,
        "train.eval_every": steps // 24,
        "train.checkpoint_every": 500,
        "train.velocity_penalty": 0.0,
    }
    return DecayThenRate(
        trainings=tuple(
            Trainee(f"{variant}-{width}", {**every, **keys}, name, "ladder.py", _DECAYS)
            for name, (variant, keys) in _MODELS.items()
        )
    )


LAPTOP, PAPER = _sweep(32), _sweep(64)

if __name__ == "__main__":
    run_study("repeated_text", __doc__, LAPTOP, PAPER)
