"""Blocks, schemes, optimizers, data sources and hooks from other packages, by importable name.

A config names one as "package.module:Name", or as "package.module:Name(size=4)" with keyword
arguments that are Python literals. The package must be importable: installed, or in a folder of
PYTHONPATH.
"""

import ast
import hashlib
import importlib
from collections.abc import Iterable, Mapping
from functools import cache, partial
from importlib import metadata
from pathlib import Path
from typing import Any

from t5x_diffeq.runtime.errors import InputError

_OWN = "t5x_diffeq"  # its version is recorded anyway
PLUGIN_KEYS = ("model.block", "model.scheme", "optimizer.name", "data.source")


def is_plugin(name: str) -> bool:
    """Whether a value is an importable name."""
    return ":" in name


@cache
def load_plugin(key: str, name: str) -> Any:
    """The object of an importable name; with arguments, a callable that has been given them.

    Args:
      key: the config key that has the name, for messages.
      name: "package.module:Name", or the same with arguments.

    Raises:
      InputError: if there is no such module or object, or the arguments aren't literals.
    """
    path, arguments = _split_arguments(key, name)
    module_name, _, attribute = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # a module may raise anything while it is imported
        raise InputError(
            f"{key}={name}: {module_name} can't be imported ({type(error).__name__}: {error}); "
            "install its package, or add its folder to PYTHONPATH"
        ) from error
    if not hasattr(module, attribute):
        public = ", ".join(sorted(each for each in vars(module) if not each.startswith("_")))
        raise InputError(f"{key}={name}: {module_name} has no {attribute}; it has {public}")
    plugin = getattr(module, attribute)
    if not arguments:
        return plugin
    if not callable(plugin):
        raise InputError(f"{key}={name}: {path} takes no arguments; leave them out")
    return partial(plugin, **arguments)


def _split_arguments(key: str, name: str) -> tuple[str, dict[str, Any]]:
    """`a.b:C` and `{"size": 4}` of `a.b:C(size=4)`."""
    path, opened, _ = name.partition("(")
    if not opened:
        return path, {}
    try:
        call = ast.parse(name[len(path.partition(":")[0]) + 1 :], mode="eval").body
        assert isinstance(call, ast.Call) and not call.args
        return path, {str(each.arg): ast.literal_eval(each.value) for each in call.keywords}
    except (SyntaxError, ValueError, AssertionError) as error:
        raise InputError(
            f"{key}={name}: the arguments must be keywords with literal values, as in "
            f"{path}(size=4)"
        ) from error


def plugin_versions(values: Mapping[str, Any]) -> dict[str, str]:
    """What identifies the code of each package that a config names, to be kept with the run.

    This is the version of the package, if it is installed, and a hash of its Python files.

    Args:
      values: the values of the config by dotted key.
    """
    names = [values[key] for key in PLUGIN_KEYS]
    names += [source for _, source, _ in values["data.mixture"]]
    names += values["train.hooks"]
    packages = {
        name.partition(".")[0].partition(":")[0]
        for name in names
        if isinstance(name, str) and is_plugin(name)
    }
    return {package: _identify(package) for package in sorted(packages)}


def changed_plugins(recorded: Mapping[str, str]) -> Iterable[str]:
    """A sentence for each package that isn't what it was when the run recorded it."""
    for package, before in recorded.items():
        if (now := _identify(package)) != before:
            yield f"{package} is {now}, and the run was made with {before}"


@cache
def _identify(package: str) -> str:
    installed = metadata.packages_distributions().get(package, ())
    version = f"{installed[0]} {metadata.version(installed[0])}" if installed else ""
    if package == _OWN:
        return version or f"{package}, not installed"
    try:
        file = Path(str(importlib.import_module(package).__file__))
    except Exception:  # it is refused where it is used
        return "missing"
    files = sorted(file.parent.rglob("*.py")) if file.name == "__init__.py" else [file]
    content = b"".join(each.read_bytes() for each in files)
    return f"{version} sha256 {hashlib.sha256(content).hexdigest()[:16]}".strip()
