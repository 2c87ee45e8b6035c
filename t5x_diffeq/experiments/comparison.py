"""Trainings of one size on one text that differ in a few keys: most experiments are such."""

from t5x_diffeq.errors import InputError
from t5x_diffeq.experiments.runs import Label, Run, flags

SEEDS = (0, 1, 2)


def laptop_config(text: str) -> str:
    """The config at laptop scale: the known small benchmark on its own text."""
    return "configs/shakespeare.py" if text == "shakespeare" else "configs/laptop.py"


def paper_config(text: str) -> str:
    """The config at the paper's: GPT-small, as in its studies of one key."""
    return "configs/gpt_small.py"


def config_for(scale: str, text: str) -> str:
    """The config of a text at a scale."""
    return laptop_config(text) if scale == "laptop" else paper_config(text)


def some_text(texts: dict[str, dict[str, object]]) -> dict[str, dict[str, object]]:
    """The texts.

    Raises:
      InputError: if there is none.
    """
    if not texts:
        raise InputError("this experiment needs a text: --text=NAME=PATH, or --text=stdlib")
    return texts


def training(
    scale: str, text: str, of_text: dict[str, object], variant: str, seed: int, **choice: object
) -> Run:
    """One training; a key of the config is written with two underscores for its dots.

    Args:
      scale: "laptop" or "paper".
      text: its name.
      of_text: its keys.
      variant: of the config: ode, baseline or shared.
      seed: of parameters, order and dropout.
      choice: the keys in which runs differ.
    """
    keys = {key.replace("__", "."): value for key, value in choice.items()}
    name = "-".join([text, variant, *(f"{short(k)}={v}" for k, v in keys.items()), f"seed={seed}"])
    labels: dict[str, Label] = {"text": text, "model": variant, "seed": seed}
    return Run(
        name,
        "train",
        (
            f"--config={config_for(scale, text)}:{variant}",
            *flags({**keys, **of_text, "seed": seed}),
        ),
        {**labels, **{short(key): value for key, value in keys.items()}},
    )


def short(key: str) -> str:
    """The last word of a key."""
    return key.rpartition(".")[2]
