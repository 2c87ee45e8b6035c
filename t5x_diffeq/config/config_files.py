"""The config files: where they are, how they are loaded, and the defaults of all keys."""

import importlib
import importlib.machinery
import importlib.util
import os
import re
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import FrozenInstanceError
from difflib import get_close_matches
from inspect import signature
from os import PathLike
from pathlib import Path
from types import ModuleType
from typing import Any

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from t5x_diffeq.config.config import (
    KEYS,
    SECTIONS,
    Config,
    explain_unknown_key,
    flatten,
    is_run,
    plain_value,
)
from t5x_diffeq.config.keys.values import dotted
from t5x_diffeq.config.plugins import offer_current_folder
from t5x_diffeq.config.unread import notes
from t5x_diffeq.system.arguments import checked
from t5x_diffeq.system.console import log
from t5x_diffeq.system.errors import InputError

_PACKAGE = Path(__file__).resolve().parents[1]
CONFIGS = next(  # inside the package if installed from a wheel, beside it in a clone
    folder for folder in (_PACKAGE / "configs", _PACKAGE.parent / "configs") if folder.is_dir()
)
_HINT_OF_RUN = "; load(WORKDIR).config is the config of a run"


def offer_configs() -> None:
    """Lets a config say `from configs import default`, wherever the project is installed."""
    if "configs" not in sys.modules:
        spec = importlib.machinery.ModuleSpec("configs", None, is_package=True)
        spec.submodule_search_locations = [str(CONFIGS)]
        sys.modules["configs"] = importlib.util.module_from_spec(spec)


class _Explained(str):
    """A message of ours within an error of the library."""


class _Keys(ConfigDict):
    """The ConfigDict of a config file, or of a section; its type errors say what a key can be."""

    _section = ""

    def _generate_did_you_mean_message(self, request: Any, message: str = "") -> str:
        """What the library says of a key that doesn't exist."""
        return _Explained(explain_unknown_key(dotted(self._section, str(request))))

    def __setitem__(self, name: str, value: object) -> None:
        if "." in name:
            raise TypeError(f"{name!r} is no item; write config.{name} = {value!r:.60}")
        if name in SECTIONS and isinstance(value, dict):  # `mesh` has a key `data`: a number
            raise TypeError(
                f"{name} is a section; set its keys: config.{name}.update({value!r:.60})"
            )
        try:
            # `plain_value` takes everything with a `dtype` for an array, and the section `model`
            # has a key of this name.
            is_section = isinstance(value, ConfigDict)
            super().__setitem__(name, value if is_section else plain_value(value))
        except TypeError as error:
            key = next((each for each in KEYS if each.rpartition(".")[2] == name), None)
            if key is None:
                raise
            fault = KEYS[key].values.fault_of_type()
            raise TypeError(f"{key} is {value!r}; {fault}") from error


def default_config() -> ConfigDict:
    """The defaults of all keys, for a config file to change; it can't add keys."""
    config = _Keys()
    for section in SECTIONS:
        config[section] = part = _Keys()
        object.__setattr__(part, "_section", section)
    for full_name, key in KEYS.items():
        section, _, name = full_name.rpartition(".")
        part = config[section] if section else config
        part[name] = placeholder(key.values.type) if key.default is None else key.default
    return config.lock()


def baseline_of(config: Config) -> Config:
    """The same config with the weights, scheme and step size of the per-layer baseline."""
    offer_configs()
    variant = importlib.import_module("configs.default").VARIANTS["baseline"]
    return config.with_values({f"model.{key}": value for key, value in variant.items()})


def config_file(name: str) -> Path:
    """`configs/NAME` in the current folder, or else the project's."""
    here, ours = Path("configs", name), CONFIGS / name
    return ours if ours.exists() and not here.exists() else here


def project_config(name: str) -> str:
    """The path of the project's `configs/NAME`, even if the current folder has another one."""
    here, ours = Path("configs", name), CONFIGS / name
    return str(ours if here.exists() and not here.samefile(ours) else here)


def values_of(name: str, variant: str) -> dict[str, Any]:
    """The values, by dotted key, of the project's config `configs/NAME:variant`."""
    return flatten(read_config_file(f"{project_config(name)}:{variant}"))


@checked
def load_config(file: str | PathLike, values: Mapping[str, object] | None = None) -> Config:
    """The config of a file, with other values for some keys.

    Args:
      file: a config file's name, which may end in a variant, as "configs/tiny.py:baseline".
        `configs/NAME.py` is the project's unless there is one here.
      values: the values by key, as {"train.total_steps": 100} or {"train": {"total_steps": 100}}; a
        variant is part of `file`.

    Raises:
      InputError: if there is no such file, or a key doesn't exist or can't take its value.
    """
    config = make_config(os.fspath(file), values or {})
    log(*notes(config.flat(), flatten(values or {})))
    return config


def make_config(file: str, values: Mapping[str, object]) -> Config:
    """`load_config` without notes on values that do nothing."""
    return Config.of(read_config_file(file)).with_values(flatten(values))


def read_config_file(file: str) -> ConfigDict:
    """What a config file's `get_config` returns, for a `file` as in `load_config`.

    Raises:
      InputError: if there is no such file, or it has a mistake, with its line.
    """
    offer_configs()
    if "://" in file:
        raise InputError(f"{file} is an address; download the file, and give its path")
    name, colon, variant = file.partition(":")
    ours = re.fullmatch(r"configs/(\w+\.py)", name)
    path = config_file(ours[1]) if ours else Path(os.path.expanduser(name))
    try:
        if not path.is_file():
            explain = _explain_folder if path.is_dir() else _explain_missing
            raise InputError(explain(name))
    except OSError as error:  # such as a name that is too long
        raise InputError(f"{file[:60]}...: {error.strerror}; name a config file") from error
    if path.suffix != ".py":
        hint = _HINT_OF_RUN if path.suffix == ".json" else ""
        raise InputError(f"{file}: a config file is written in Python, as configs/tiny.py is{hint}")
    try:
        get_config = getattr(_import_file(path), "get_config", None)
        if not callable(get_config):
            raise InputError(f"{file} has no function get_config(), as configs/tiny.py has")
        if colon and not signature(get_config).parameters:
            raise InputError(f"{file}: this file has no variants; leave out the colon and the rest")
        given = [variant] if colon else []
        _check_parameters(get_config, given, file)
        config = get_config(*given)
    except SyntaxError as error:
        where = path if error.filename in (None, str(path.absolute())) else error.filename
        line = f", line {error.lineno}" if error.lineno else ""
        raise InputError(f"{where}{line}: {error.msg}") from error
    except InputError:
        raise
    except SystemExit as error:
        raise InputError(
            f"{file} ends the process (SystemExit: {error}); a config file has no arguments but "
            "the variant: take out argparse and sys.exit"
        ) from error
    except Exception as error:
        raise InputError(_explain_mistake(error, path, file)) from error
    if not isinstance(config, ConfigDict):
        raise InputError(
            f"{file}: get_config() returns a {type(config).__name__}, not a ConfigDict; "
            "begin with that of configs/default.py, as configs/tiny.py does"
        )
    return config


def _check_parameters(get_config: Callable, given: list[str], file: str) -> None:
    """Raises an InputError if `get_config` can't be called with the variant, or without one."""
    try:
        signature(get_config).bind(*given)
    except TypeError as error:
        hint = "let it have one parameter, the variant, with a default: get_config(variant='ode')"
        raise InputError(f"{file}: get_config(): {error}; {hint}") from error


def _explain_folder(name: str) -> str:
    """One line for a folder in place of a config file."""
    if not name:
        return "--config is empty; name a config file"
    hint = _HINT_OF_RUN if is_run(Path(os.path.expanduser(name))) else ""
    return f"{name} is a folder; name a config file{hint}"


def _explain_missing(file: str) -> str:
    """One line for a config file that doesn't exist: the one with the nearest name, or all."""
    if " --" in file:
        flag = file[file.index(" --") + 1 :].split()[0]
        return f"--config has {flag} in its value; leave out the quotes around all of it"
    if wrong := re.fullmatch(r"(.*\.py)[#@,/](\w+)", file):
        return f"{file}: there is no such file; did you mean {wrong[1]}:{wrong[2]}?"
    paths = (path for folder in (Path("configs"), CONFIGS) for path in folder.glob("*.py"))
    names = {path.stem for path in paths if "def get_config(" in path.read_text("utf-8")}
    if near := get_close_matches(Path(file).stem, sorted(names), n=1):
        hint = f"did you mean configs/{near[0]}.py?"
    else:
        hint = f"there are {', '.join(f'configs/{name}.py' for name in sorted(names))}"
    return f"{file}: there is no such file; {hint}"


def _explain_mistake(error: Exception, path: Path, file: str) -> str:
    """One line for what a config file raises: the file, the line, and the way out."""
    frames = traceback.extract_tb(error.__traceback__)
    at = next((each for each in reversed(frames) if each.filename == str(path.absolute())), None)
    reason: Any = error
    while isinstance(reason, AttributeError | KeyError) and reason.args:  # ConfigDict's are nested
        reason = reason.args[0]
    message = " ".join(str(reason).split())
    if isinstance(error, ValueError) and ":" in file:
        return f"{file}: {message}"  # most likely, it has no such variant
    if isinstance(error, FrozenInstanceError) or "is immutable" in message:
        message = (
            "this config is frozen; change what get_config() of configs/default.py, or of another "
            "config file, returns"
        )
    elif "trying to delete" in message:
        message = "keys can't be deleted; set the key to its default, or leave it as it is"
    elif "attempted relative import" in message:
        message += "; import by name: from configs import tiny, or import NAME of a file beside it"
    elif not isinstance(reason, _Explained | ValueError | TypeError):
        message = f"{type(error).__name__}: {message}"
    return f"{path}, line {at.lineno}: {message}" if at else f"{path}: {message}"


def _import_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"config_{path.stem}", path)
    assert spec is not None and spec.loader is not None  # its name ends in .py
    module = importlib.util.module_from_spec(spec)
    if CONFIGS not in path.resolve().parents:
        offer_current_folder()  # a person's own file may import others
    spec.loader.exec_module(module)
    return module
