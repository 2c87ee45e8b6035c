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
    """The required packages that are missing or too old: `numpy>=2.0 (it has 1.26.4)`."""
    with suppress(metadata.PackageNotFoundError):  # not installed, so no requirements are known
        return [*filter(None, map(_lack, metadata.requires("t5x_diffeq") or ()))]
    return []


def _lack(requirement: str) -> str | None:
    match = re.match(r"([\w-]+)[^;]*?>=([\d.]+)[^;]*$", requirement)  # an extra's would have a ;
    if not match:
        return None
    name, least = match.groups()
    try:
        installed = metadata.version(name)
    except metadata.PackageNotFoundError:
        return f"{name}>={least}"
    numbers, needed = ([*map(int, re.findall(r"\d+", each)[:3])] for each in (installed, least))
    return f"{name}>={least} (it has {installed})" if numbers < needed else None


def install_command(extra: str = "") -> str:
    """The command that installs this package with an extra: the clone it runs from, or by name."""
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
