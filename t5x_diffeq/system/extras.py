"""The version of this package, and the extras: a feature that needs one says how to install it."""

import importlib.util
import os
import re
import shlex
import sys
from contextlib import suppress
from importlib import metadata
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


def find_lacking() -> list[str]:
    """What nothing runs without, and is missing or too old: `numpy>=2.0 (it has 1.26.4)`."""
    with suppress(metadata.PackageNotFoundError):  # run from a folder, which names none
        return [*filter(None, map(_lack, metadata.requires("t5x_diffeq") or ()))]
    return []


def _lack(requirement: str) -> str | None:
    named = re.match(r"([\w-]+)[^;]*?>=([\d.]+)[^;]*$", requirement)  # those of extras have a ;
    if not named:
        return None
    name, least = named.groups()
    try:
        there = metadata.version(name)
    except metadata.PackageNotFoundError:
        return f"{name}>={least}"
    numbers, needed = ([*map(int, re.findall(r"\d+", each)[:3])] for each in (there, least))
    return f"{name}>={least} (it has {there})" if numbers < needed else None


def install_command(extra: str = "") -> str:
    """The command that installs the package with an extra: a clone, if it is one's, or by name."""
    clone = Path(__file__).parents[2]
    is_clone = (clone / "pyproject.toml").exists()
    what = f"{clone if is_clone else 't5x_diffeq'}{f'[{extra}]' if extra else ''}"
    what = f"{'-e ' if is_clone else ''}{shlex.quote(what)}"
    return f"{python_command()} -m pip install {what}"


def python_command() -> str:
    """The interpreter, as the user types it."""
    try:
        relative = os.path.relpath(sys.executable)
    except OSError:  # the current folder was deleted
        return shlex.quote(sys.executable)
    return shlex.quote(min(sys.executable, relative, key=len))
