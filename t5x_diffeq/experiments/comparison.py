"""Trainings of one size on one text that differ in a few keys: most experiments are such."""

from dataclasses import dataclass
from itertools import product

from t5x_diffeq.config_files import config_of, flatten
from t5x_diffeq.errors import InputError
from t5x_diffeq.experiments.present import Layout
from t5x_diffeq.experiments.runs import Label, Run, flags

SEEDS = (0, 1, 2)

Keys = dict[str, object]  # values by key of the config
Choices = dict[str, tuple[Label, ...]]  # the values of a key in which runs differ


@dataclass(frozen=True)
class Comparison:
    """Every choice with every other, on every text, by three seeds.

    Attributes:
      variants: of the config (ode, baseline, shared), and the choices of each.
      layouts: the tables.
    """

    variants: dict[str, Choices]
    layouts: tuple[Layout, ...]

    def runs(self, scale: str, texts: dict[str, Keys], done: dict[str, dict]) -> list[Run]:
        """All runs.

        Args:
          scale: "laptop" or "paper".
          texts: by name, their keys of the config.
          done: outcomes by the name of their run.

        Raises:
          InputError: if there is no text.
        """
        need_text(texts)
        return [
            training(config_for(scale, text), text, keys, variant, choice, seed)
            for text, keys in texts.items()
            for variant, choices in self.variants.items()
            for choice in every(choices)
            for seed in SEEDS
        ]


def every(choices: Choices) -> list[Keys]:
    """Every choice with every other."""
    return [dict(zip(choices, values, strict=True)) for values in product(*choices.values())]


def need_text(texts: dict[str, Keys]) -> None:
    """There is a text.

    Raises:
      InputError: if not.
    """
    if not texts:
        raise InputError("this experiment needs a text: --text=NAME=PATH, or --text=stdlib")


def training(
    config: str,
    text: str,
    of_text: Keys,
    variant: str,
    choice: Keys,
    seed: int,
    model: str | None = None,
) -> Run:
    """One training, named by all that makes it what it is: experiments share runs of one name.

    It is labelled by text, model, seed, and the last words of the keys that it sets.

    Args:
      config: its file, such as "gpt_small.py".
      text: its name.
      of_text: its keys of the config.
      variant: of the config.
      choice: keys that it sets; what the file says anyhow is left out of command and name.
      seed: of the config.
      model: in tables, instead of the variant.
    """
    own = flatten(config_of(config, variant))
    chosen = {key: value for key, value in choice.items() if own[key] != value}
    words = [f"{last_word(key)}={in_name(value)}" for key, value in chosen.items()]
    size = config.removesuffix(".py")
    return Run(
        "-".join([*dict.fromkeys((size, text)), variant, *words, f"seed={seed}"]),
        "train",
        (f"--config=configs/{config}:{variant}", *flags({**chosen, **of_text, "seed": seed})),
        {
            "text": text,
            "model": model or variant,
            "seed": seed,
            **{last_word(key): value for key, value in choice.items()},
        },
    )


def last_word(key: str) -> str:
    """`optimizer.beta2` is beta2."""
    return key.rpartition(".")[2]


def in_name(value: object) -> str:
    """A value of a key, as a part of a file's name."""
    return "+".join(map(str, value)) if isinstance(value, tuple) else str(value)


def config_for(scale: str, text: str) -> str:
    """GPT-small, on which the paper studies single keys; on a laptop, the text's own benchmark."""
    if scale == "paper":
        return "gpt_small.py"
    return "shakespeare.py" if text == "shakespeare" else "laptop.py"
