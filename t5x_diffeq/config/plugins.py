"""Blocks, schemes, optimizers, data sources and hooks from other packages, by importable name.

A config names one as "package.module:Name", or as "package.module:Name(size=4)" with arguments that
are Python literals. The package must be importable: installed, in a folder of PYTHONPATH, or in the
current folder, which is the last on the path, and only once code in it is named.

Loading one runs its code. A person who writes a name in a config file, on the command line or in
Python asks for that. A file that came with a run may name only what the package
itself defines. Any other text that can lead to code (an importable name, a template; `Key.asks`) is
refused unless the person trusts the file, or has given the same text for the same key
(`check_trusted`).
"""

import ast
import hashlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import FrozenInstanceError
from difflib import get_close_matches
from functools import cache, partial
from importlib import metadata
from importlib.machinery import ModuleSpec, PathFinder
from inspect import isroutine, signature
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from t5x_diffeq.config.config import KEYS
from t5x_diffeq.system.errors import OWN_ERRORS, InputError, describe_foreign

_OWN = "t5x_diffeq"  # its version is recorded anyway
_OWN_NAMES = ("t5x_diffeq.model.parallel_block:ParallelBlock",)
_Made = TypeVar("_Made")
# Kinds that a function is seldom meant to return: what to write instead.
_NO_FUNCTIONS = {
    "Scheme": "make a scheme of a step: Scheme(step, nodes=..., order=..., evaluations=...)",
    **dict.fromkeys(
        ("TimeBasis", "WeightSource", "Block", "LogitsTerm"), "derive a class from that instead"
    ),
}
# Kinds that only a function makes.
_WRITE_A_FUNCTION = {
    "GradientTransformation": "write a function make(config, declared) -> "
    "optax.GradientTransformation, which gets config.optimizer and the declared parameters",
    "Source": "write a function documents(config) -> tuple, which gets config.data and returns the "
    "texts to train and to validate on",
}
_KEYS = {"Scheme": "model.scheme", "GradientTransformation": "optimizer.name"}  # of objects
_MOST_NAMES = 20  # in a message
trust_all = False  # set by --trust_plugins
_trusted: set[tuple[str, str]] = set()  # keys and texts that a person has given, or trusts


def is_plugin(name: str) -> bool:
    """Whether a value is an importable name; `legendre:8` isn't."""
    return name.partition(":")[2][:1].isidentifier()


@cache
def load_plugin(key: str, name: str) -> Any:
    """The object of an importable name, given the name's arguments; an InputError if invalid."""
    path, positional, arguments = _split_arguments(key, name)
    module_name, _, attribute = path.partition(":")
    if _find(module_name.partition(".")[0]) is None:
        offer_current_folder()
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # a module may raise anything while it is imported
        way_out = "correct it"
        if isinstance(error, ModuleNotFoundError):
            way_out = "install its package, or add its folder to PYTHONPATH"
        if module_name.endswith(".py"):
            way_out = f"a module is named without .py, as in {module_name[:-3]}:{attribute}"
        raise InputError(
            f"{key}={name}: {module_name} can't be imported ({type(error).__name__}: {error}); "
            f"{way_out}"
        ) from error
    if not hasattr(module, attribute):
        public = sorted(each for each in vars(module) if not each.startswith("_"))
        near = get_close_matches(attribute, public, n=3)
        shown = [*near, *(each for each in public if each not in near)][:_MOST_NAMES]
        where = getattr(module, "__file__", None) or "built into Python"
        raise InputError(
            f"{key}={name}: {module_name} has no {attribute}; it is {where}, and has "
            f"{', '.join(shown)}{' and others' if len(shown) < len(public) else ''}"
        )
    plugin = getattr(module, attribute)
    if not positional and not arguments:
        return plugin
    if not callable(plugin):
        raise InputError(f"{key}={name}: {path} takes no arguments; leave them out")
    return partial(plugin, *positional, **arguments)


def make_plugin(key: str, name: str, *kinds: type[_Made], **given: Any) -> _Made:
    """What an importable name makes of some arguments: an instance of one of these classes.

    The name stands for a class derived from one of them, a function whose annotation says that it
    returns one of them, or an instance.

    Raises:
      InputError: if the name stands for something else, or can't be called with these arguments.
    """
    make = load_plugin(key, name)
    if isinstance(make, kinds):
        return make
    check_returns(key, name, make, *kinds)
    try:
        instance = make(**given)
    except TypeError as error:
        raise InputError(
            f"{key}={name} can't be made: {error}; {_explain_arguments(name, make, given)}"
        ) from error
    except FrozenInstanceError as error:
        raise InputError(
            f"{key}={name} can't be made: {error}; declare its arguments as attributes of the "
            "class (size: int = 4), and leave __init__ out"
        ) from error
    if not isinstance(instance, kinds):
        names = " or ".join(map(_full_name, kinds))
        raise InputError(
            f"{key}={name} returns a {type(instance).__name__}; it must return a {names}"
        )
    return instance


def call_plugin(key: str, name: str, plugin: Callable, *arguments: Any) -> Any:
    """What another package's function returns; an InputError that says what it raises."""
    try:
        return plugin(*arguments)
    except OWN_ERRORS:
        raise
    except Exception as error:
        try:
            signature(plugin).bind(*arguments)
            hint = ""
        except (TypeError, ValueError):
            kinds = ", ".join(type(each).__name__ for each in arguments)
            hint = f"; it is called with {kinds}, and arguments of its own come after these"
        raise InputError(f"{key}={name} fails: {describe_foreign(error)}{hint}") from error


def offer_current_folder() -> None:
    """Puts the current folder last on the path, where it hides no package."""
    with suppress(FileNotFoundError):  # it was deleted
        if not {"", os.getcwd()}.intersection(sys.path):
            sys.path.append(os.getcwd())


def _find(package: str) -> ModuleSpec | None:
    """Where a package is, without importing it; None if it isn't on the path."""
    try:
        return importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return None


def check_returns(key: str, name: str, plugin: Any, *kinds: type) -> None:
    """Raises an InputError unless a function's annotation says that it returns one of these kinds.

    A class returns its instances. Anything else that a name may stand for, such as
    `subprocess:run`, is not called.
    """
    function = getattr(plugin, "func", plugin)  # `load_plugin` binds arguments by a partial
    try:
        hint = function if isinstance(function, type) else get_type_hints(function).get("return")
    except (TypeError, NameError):  # it isn't a function, or its annotations can't be evaluated
        hint = None
    returned = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    classes = [get_origin(each) or each for each in returned]
    if all(isinstance(each, type) and issubclass(each, kinds) for each in classes):
        return
    names = " or ".join(map(_full_name, kinds))
    called, kind = name.partition(":")[2].partition("(")[0], kinds[0].__name__
    if isinstance(function, type):
        way_out = _WRITE_A_FUNCTION.get(kind, "derive it from that")
        raise InputError(f"{key}={name} is no subclass of {names}; {way_out}")
    if not isroutine(function):
        made = type(function).__name__
        way_out = _WRITE_A_FUNCTION.get(kind, f"name a {kind}, or what returns one")
        elsewhere = f", and {_KEYS[made]} names such an object" if made in _KEYS else ""
        raise InputError(f"{key}={name} is a {made}{elsewhere}; {way_out}")
    if KEYS[key].values.has_word(called) and function.__module__.startswith(f"{_OWN}."):
        raise InputError(f"{key}={name}: {called} is built in; write {key}={called}")
    way_out = _NO_FUNCTIONS.get(kind) or _WRITE_A_FUNCTION.get(
        kind, f"annotate its result (def {called}(...) -> {kind})"
    )
    raise InputError(
        f"{key}={name} is not called, because it doesn't say that it returns {names}; {way_out}, "
        "or name another function"
    )


def _explain_arguments(name: str, make: Callable, given: Mapping[str, Any]) -> str:
    """The arguments that a plug-in can be given, or how to write one, after it refused some."""
    function = getattr(make, "func", make)
    try:
        taken = [*signature(function).parameters]
    except (TypeError, ValueError):  # of a class without a signature
        return "it takes other arguments"
    if isinstance(function, type) and not {*given} <= {*taken}:
        return (
            f"it is called with {', '.join(given)}; declare its own arguments as attributes of the "
            "class (size: int = 4), and leave __init__ out"
        )
    parameters = [each for each in taken if each not in given]
    if not parameters:
        return "it takes no arguments of its own"
    own = f"{name.partition('(')[0]}({', '.join(f'{each}=...' for each in parameters)})"
    return f"its own arguments are {own}"


def _full_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _split_arguments(key: str, name: str) -> tuple[str, list[Any], dict[str, Any]]:
    """`a.b:C`, `[9]` and `{"size": 4}` of `a.b:C(9, size=4)`."""
    path, opened, _ = name.partition("(")
    if not opened:
        return path, [], {}
    try:
        call = ast.parse(name[len(path.partition(":")[0]) + 1 :], mode="eval").body
        assert isinstance(call, ast.Call)
        named = {str(each.arg): ast.literal_eval(each.value) for each in call.keywords}
        return path, [ast.literal_eval(each) for each in call.args], named
    except (SyntaxError, ValueError, AssertionError) as error:
        raise InputError(
            f"{key}={name}: the arguments must be literal values, as in {path}(size=4)"
        ) from error


def trust(values: Mapping[str, Any]) -> None:
    """Trusts, in this process, the code that a config names; for configs that a person wrote."""
    _trusted.update(_asked_texts(values))


def foreign_plugins(values: Mapping[str, Any]) -> list[str]:
    """`key=text` for each text of a config that can lead to code outside this package."""
    return [f"{key}={text}" for key, text in _foreign_texts(values)]


def check_trusted(values: Mapping[str, Any], where: object) -> None:
    """Raises an InputError unless a person trusts all code that the config at `where` names."""
    unknown = [each for each in _foreign_texts(values) if each not in _trusted]
    if trust_all or not unknown:
        return trust(values)
    raise InputError(
        f"{where} names code of other packages, which would be run: "
        f"{', '.join('='.join(each) for each in unknown)}; if you trust it, give the same value "
        "yourself, or add --trust_plugins (in Python, trust_plugins=True)"
    )


def _foreign_texts(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    texts = _asked_texts(values)
    return [(key, text) for key, text in texts if text.partition("(")[0] not in _OWN_NAMES]


def _asked_texts(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The keys and texts of a config that can lead to code."""
    known = [(key, KEYS[key], value) for key, value in values.items() if key in KEYS]
    return [(name, text) for name, key, value in known for text in key.texts_to_ask_for(value)]


def plugin_versions(values: Mapping[str, Any]) -> dict[str, str]:
    """What identifies the code of each package that a config names, to be kept with the run.

    This is the version of the package, if it is installed, and a hash of its Python files.
    """
    names = [text for _, text in _asked_texts(values) if is_plugin(text)]
    packages = {name.partition(".")[0].partition(":")[0] for name in names}
    return {package: _identify(package) for package in sorted(packages)}


def changed_plugins(values: Mapping[str, Any], recorded: Mapping[str, str]) -> Iterable[str]:
    """A sentence for each package that isn't what `plugin_versions` recorded with the run."""
    for package, now in plugin_versions(values).items():
        if (before := recorded.get(package, now)) != now:
            yield f"{package} is {now}, and the run was made with {before}"


@cache
def _identify(package: str) -> str:
    installed = metadata.packages_distributions().get(package, ())
    version = f"{installed[0]} {metadata.version(installed[0])}" if installed else ""
    if package == _OWN:
        return version or f"{package}, not installed"
    spec = _find(package)
    with suppress(FileNotFoundError):
        spec = spec or PathFinder.find_spec(package, [os.getcwd()])
    if spec is None:
        return "missing"  # it is refused where it is used
    folders = [Path(each) for each in spec.submodule_search_locations or ()]
    files = sorted(file for folder in folders for file in folder.rglob("*.py") if file.is_file())
    files = files or [Path(spec.origin)] if spec.has_location and spec.origin else []
    content = b"".join(each.read_bytes() for each in files)
    return f"{version} sha256 {hashlib.sha256(content).hexdigest()[:16]}".strip()
