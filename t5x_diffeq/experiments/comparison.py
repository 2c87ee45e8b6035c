"""Trainings of one size on one text that differ in a few keys: most experiments are such."""

from dataclasses import dataclass
from itertools import product

from t5x_diffeq.errors import InputError
from t5x_diffeq.experiments.present import Layout
from t5x_diffeq.experiments.runs import Label, Run, flags

SEEDS = (0, 1, 2)


Choices = dict[str, tuple[Label, ...]]  # values of each key of the config in which runs differ


@dataclass(frozen=True)
class Comparison:
    """Every choice with every other, on every text, by three seeds.

    Attributes:
      variants: of the config (ode, baseline, shared), and the choices of each.
      layouts: the tables.
      papers: the same as `variants` at the paper's scale; None: no others.
    """

    variants: dict[str, Choices]
    layouts: tuple[Layout, ...]
    papers: dict[str, Choices] | None = None

    def runs(self, scale: str, texts: dict[str, dict[str, object]]) -> list[Run]:
        """All runs.

        Args:
          scale: "laptop" or "paper".
          texts: by name, their keys of the config.

        Raises:
          InputError: if there is none.
        """
        need_text(texts)
        variants = self.papers if self.papers and scale == "paper" else self.variants
        return [
            training(
                config_for(scale, text),
                text,
                keys,
                variant,
                dict(zip(choices, choice, strict=True)),
                seed,
            )
            for text, keys in texts.items()
            for variant, choices in variants.items()
            for choice in product(*choices.values())
            for seed in SEEDS
        ]


def need_text(texts: dict[str, dict[str, object]]) -> None:
    """There is a text.

    Raises:
      InputError: if not.
    """
    if not texts:
        raise InputError("this experiment needs a text: --text=NAME=PATH, or --text=stdlib")


def training(
    config: str,
    text: str,
    of_text: dict[str, object],
    variant: str,
    choice: dict[str, Label],
    seed: int,
) -> Run:
    """One training, labelled by the last words of the keys it chooses."""
    chosen = {key.rpartition(".")[2]: value for key, value in choice.items()}
    name = [text, variant, *(f"{word}={value}" for word, value in chosen.items()), f"seed={seed}"]
    return Run(
        "-".join(name),
        "train",
        (f"--config={config}:{variant}", *flags({**choice, **of_text, "seed": seed})),
        {"text": text, "model": variant, "seed": seed, **chosen},
    )


def config_for(scale: str, text: str) -> str:
    """GPT-small, on which the paper studies single keys; on a laptop, the text's own benchmark."""
    if scale == "paper":
        return "configs/gpt_small.py"
    return "configs/shakespeare.py" if text == "shakespeare" else "configs/laptop.py"
