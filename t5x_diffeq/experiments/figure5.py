"""Figure 5 of the paper (section 6.2): trained with 18 steps on one text, tuned on another.

W(t) is discretised on grids of 9, 12, 18 and 24 steps and tuned as layer weights, by LoRA or in
full; or the hypernetwork itself is tuned (which the paper does not do). The baseline has 24 layers
throughout. Each of the two texts is the first one once.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product

from t5x_diffeq.config.config_files import values_of
from t5x_diffeq.experiments.experiment import Experiment, Keys, Texts
from t5x_diffeq.experiments.present import TableSpec
from t5x_diffeq.experiments.runs import ExperimentRun, Label, format_flags
from t5x_diffeq.experiments.tokenizers import KEY, fill_in_tokenizer
from t5x_diffeq.system.errors import InputError

_STEPS = {"ode": 18, "baseline": 24}
_TUNINGS = {  # methods and grids
    "ode": tuple(product(("lora", "full", "hypernetwork"), (9, 12, 18, 24))),
    "baseline": (("lora", 24), ("full", 24)),
}


@dataclass(frozen=True, kw_only=True)
class Figure5(Experiment):
    """Training on each of two texts, and every way of tuning on the other.

    Attributes:
      config: config of the trainings.
      base: keys of the trainings, by variant.
      tuning: keys of every tuning.
      of_method: further keys of tunings, by method.
    """

    config: str
    base: dict[str, Keys] = field(default_factory=dict)
    tuning: Keys
    of_method: dict[str, Keys]
    tables: tuple[TableSpec, ...] = (
        TableSpec(("trained on", "tuned on", "method"), "steps", "perplexity", over_steps=True),
    )
    seeds: int = 1

    def runs(
        self, texts: Texts, seeds: Sequence[int], done: dict[str, dict]
    ) -> list[ExperimentRun]:
        """All runs, each training before its tunings.

        Args:
          texts: two texts, or one besides the standard library.
          seeds: seeds of trainings and tunings.
          done: ignored.

        Raises:
          InputError: if there are not two texts.
        """
        texts = texts if len(texts) == 2 else {"stdlib": {"data.source": "stdlib"}, **texts}
        if len(texts) != 2:
            raise InputError("figure5 needs two texts: set --text=NAME=PATH; the other is stdlib")
        architecture = values_of(self.config, "ode")["model.architecture"]
        texts = {name: fill_in_tokenizer(keys, architecture) for name, keys in texts.items()}
        return [
            run
            for seed in seeds
            for source, target in (tuple(texts), tuple(texts)[::-1])
            for variant in _STEPS
            for run in self._train_and_tune(source, target, variant, texts, seed)
        ]

    def _train_and_tune(
        self, source: str, target: str, variant: str, texts: Texts, seed: int
    ) -> list[ExperimentRun]:
        """A training on one text and its tunings on the other."""
        suffix, with_seed = (f"-seed={seed}", {"seed": seed}) if seed else ("", {})
        keys = {"model.num_steps": _STEPS[variant], **self.base.get(variant, {}), **with_seed}
        config = f"--config=configs/{self.config}:{variant}"
        trained = f"{source}-{variant}{suffix}"
        runs = [ExperimentRun(trained, "train", (config, *format_flags({**keys, **texts[source]})))]
        for method, steps in _TUNINGS[variant]:
            keys = {**self.tuning, **self.of_method.get(method, {}), **texts[target], **with_seed}
            keys.pop(KEY, None)  # the tokenizer comes from the run that is tuned
            arguments = (
                f"--config=configs/finetune.py:{method}",
                f"--config.init_from={{output}}/{trained}",
                *format_flags({**keys, "model.num_steps": steps}),
            )
            labels: dict[str, Label] = {
                "trained on": source,
                "tuned on": target,
                "seed": seed,
                "method": f"{variant}, {method}",
                "steps": steps,
            }
            name = f"{trained}-{method}-{steps}"
            runs.append(ExperimentRun(name, "finetune", arguments, labels, trained))
        return runs
