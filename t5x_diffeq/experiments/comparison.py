"""Trainings that differ in a few keys of the config, as in most experiments."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product

from t5x_diffeq.experiments.experiment import Experiment, Keys, Texts, need_text
from t5x_diffeq.experiments.runs import ExperimentRun, Label, format_flags, name_choices
from t5x_diffeq.experiments.tokenizers import fill_in_tokenizer
from t5x_diffeq.runtime.config_files import values_of

Choices = dict[str, tuple[Label, ...]]  # the values of each key in which runs differ

_WIDTH = "model.time_embed_dim"


@dataclass(frozen=True, kw_only=True)
class Comparison(Experiment):
    """Every choice of every variant, on every text and model, with every seed.

    Attributes:
      variants: variants of the config (ode, baseline, shared), and the choices of each.
      models: by config file, the keys that all its runs set; empty for the text's laptop config.
      models_of: by the name of a text, its models where they differ.
    """

    variants: dict[str, Choices]
    models: dict[str, Keys] = field(default_factory=dict)
    models_of: dict[str, dict[str, Keys]] = field(default_factory=dict)

    def runs(
        self, texts: Texts, seeds: Sequence[int], done: dict[str, dict]
    ) -> list[ExperimentRun]:
        """All runs."""
        need_text(texts)
        return [
            make_training(config, text, keys, variant, {**own, **choice}, seed)
            for text, keys in texts.items()
            for config, own in self._models_for(text).items()
            for variant, choices in self.variants.items()
            for choice in _combine_choices(choices)
            for seed in seeds
        ]

    def _models_for(self, text: str) -> dict[str, Keys]:
        return self.models_of.get(text) or self.models or {laptop_config(text): {}}


def _combine_choices(choices: Choices) -> list[Keys]:
    return [dict(zip(choices, values, strict=True)) for values in product(*choices.values())]


def make_training(
    config: str,
    text: str,
    of_text: Keys,
    variant: str,
    choice: Keys,
    seed: int,
    model: str | None = None,
) -> ExperimentRun:
    """One training, named after everything that sets it apart, so experiments can share it.

    Its labels are text, size, model, seed, T, and the last part of each key that it sets.

    Args:
      config: the config's file, such as "gpt_small.py".
      text: the text's name.
      of_text: keys of the config for the text.
      variant: variant of the config.
      choice: keys that it sets; the file's own values are left out of command and name.
      seed: seed of the config.
      model: the model's name in tables, instead of the variant.
    """
    own: Keys = values_of(config, variant)
    generated = own["model.weights"] == "time_dependent"
    chosen = {
        key: value
        for key, value in choice.items()
        if own[key] != value and (generated or key != _WIDTH)
    }
    size = config.removesuffix(".py")
    found = fill_in_tokenizer(of_text, own["model.architecture"])
    return ExperimentRun(
        "-".join([*dict.fromkeys((size, text)), variant, *name_choices(chosen), f"seed={seed}"]),
        "train",
        (f"--config=configs/{config}:{variant}", *format_flags({**chosen, **found, "seed": seed})),
        {
            "text": text,
            "size": size,
            "model": model or variant,
            "seed": seed,
            "T": choice.get(_WIDTH, own[_WIDTH]) if generated else variant,
            **{_last_word(key): value for key, value in choice.items()},
        },
    )


def _last_word(key: str) -> str:
    return key.rpartition(".")[2]


def laptop_config(text: str) -> str:
    """The config file for a text on a laptop: its own, if it has one."""
    return "shakespeare.py" if text == "shakespeare" else "laptop.py"
