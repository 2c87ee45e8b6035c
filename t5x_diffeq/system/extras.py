"""The version of this package, and the extras: a feature that needs one says how to install it."""

import importlib.util
import os
import shlex
import sys
from pathlib import Path

from t5x_diffeq.system.errors import InputError

__version__ = "0.1.0"
EXTRAS = {
    "datasets": "data",
    "diffrax": "adaptive",
    "gcsfs": "gcs",
    "huggingface_hub": "data",
    "jinja2": "data",
    "lm_eval": "eval",
    "matplotlib": "analysis",
    "pyarrow": "data",
    "safetensors": "export",
    "starlette": "explore",
    "tokenizers": "data",
    "transformers": "data",
    "uvicorn": "explore",
    "wandb": "trackers",
}


def need_package(name: str, asked_by: str, otherwise: str = "") -> None:
    """Raises an InputError, with the way out, if a package of an extra isn't installed."""
    if importlib.util.find_spec(name) is None:
        way_out = f", or {otherwise}" if otherwise else ""
        raise InputError(
            f"{asked_by} needs the package {name}; {install_command(EXTRAS[name])}{way_out}"
        )


def install_command(extra: str) -> str:
    """The command that installs an extra: into the clone, if the package is one's, else by name."""
    clone = Path(__file__).parents[2]
    is_clone = (clone / "pyproject.toml").exists()
    what = f"-e {shlex.quote(f'{clone}[{extra}]')}" if is_clone else f"'t5x_diffeq[{extra}]'"
    return f"{python_command()} -m pip install {what}"


def python_command() -> str:
    """The interpreter, as the user types it."""
    try:
        relative = os.path.relpath(sys.executable)
    except OSError:  # the current folder was deleted
        return shlex.quote(sys.executable)
    return shlex.quote(min(sys.executable, relative, key=len))
