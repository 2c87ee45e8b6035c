"""Models of the Hugging Face Hub, by their id: `gpt2`, `Qwen/Qwen3-0.6B`."""

import re
from pathlib import Path

from t5x_diffeq.system.errors import InputError
from t5x_diffeq.system.extras import install_command

_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt"]


def is_hub_id(name: str) -> bool:
    """Whether `name` has the form of a model's id."""
    return re.fullmatch(r"(\w[\w.-]*/)?\w[\w.-]*", name, re.ASCII) is not None


def fetch_model(name: str) -> Path:
    """The folder of a model in huggingface_hub's cache, downloaded if it isn't there.

    The library shows its progress.

    Raises:
      InputError: if huggingface_hub isn't installed, or the Hub doesn't provide the model.
    """
    by_hand = f"where the Hub can be reached: hf download {name} --local-dir=DIR, then --input=DIR"
    try:
        from huggingface_hub import errors, snapshot_download  # takes a second
    except ImportError as error:
        raise InputError(
            f"--input={name}: there is no such folder; to fetch the model of that name from the "
            f"Hugging Face Hub, {install_command('huggingface')}, or {by_hand}"
        ) from error
    try:
        return Path(snapshot_download(name, allow_patterns=_FILES))
    except errors.RepositoryNotFoundError:
        raise InputError(
            f"--input={name}: there is no such folder, nor such a model on the Hugging Face Hub "
            "(if it is private or gated: hf auth login)"
        ) from None
    except (errors.HfHubHTTPError, errors.HFValidationError, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise InputError(
            f"--input={name}: there is no such folder, and the Hugging Face Hub doesn't give the "
            f"model ({reason}); {by_hand}"
        ) from None
