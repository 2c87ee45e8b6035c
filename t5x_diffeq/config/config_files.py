"""The config files: where they are, how they are loaded, and the defaults of all keys."""

import importlib
import importlib.machinery
import importlib.util
import sys
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from t5x_diffeq.config.config import KEYS, SECTIONS, Config, check_key, flatten
from t5x_diffeq.system.errors import InputError

_PACKAGE = Path(__file__).resolve().parents[1]
CONFIGS = next(  # inside the package if installed from a wheel, beside it in a clone
    folder for folder in (_PACKAGE / "configs", _PACKAGE.parent / "configs") if folder.is_dir()
)


def offer_configs() -> None:
    """Lets a config say `from configs import default`, wherever the project is installed."""
    if "configs" not in sys.modules:
        spec = importlib.machinery.ModuleSpec("configs", None, is_package=True)
        spec.submodule_search_locations = [str(CONFIGS)]
        sys.modules["configs"] = importlib.util.module_from_spec(spec)


def default_config() -> ConfigDict:
    """The defaults of all keys, for a config file to change; it can't add keys."""
    config = ConfigDict({section: {} for section in SECTIONS})
    for dotted, key in KEYS.items():
        section, _, name = dotted.rpartition(".")
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


def explain_missing_config(file: str) -> str:
    """One line for a config file that doesn't exist: the nearest that does, or all of them."""
    paths = (path for folder in (Path("configs"), CONFIGS) for path in folder.glob("*.py"))
    names = {path.stem for path in paths if "def get_config(" in path.read_text("utf-8")}
    if near := get_close_matches(Path(file).stem, sorted(names), n=1):
        hint = f"did you mean configs/{near[0]}.py?"
    else:
        hint = f"there are {', '.join(f'configs/{name}.py' for name in sorted(names))}"
    return f"{file}: there is no such file; {hint}"


def values_of(name: str, variant: str) -> dict[str, Any]:
    """The values, by dotted key, of the config that `configs/NAME:variant` returns."""
    offer_configs()
    return flatten(_import_file(config_file(name)).get_config(variant))


def load_config(file: str, values: Mapping[str, object] | None = None) -> Config:
    """The config of a file, with other values for some (dotted) keys.

    The file's name may end in a variant, as "configs/tiny.py:baseline". `configs/NAME.py` is the
    project's unless there is one here.

    Raises:
      InputError: if there is no such file, or a key doesn't exist or can't take its value.
    """
    path, _, variant = file.partition(":")
    offer_configs()
    folder, _, name = path.rpartition("/")
    path_here = config_file(name) if folder == "configs" else Path(path)
    try:
        is_there = path_here.is_file()
    except OSError as error:  # such as a name that is too long
        raise InputError(f"{file[:60]}...: {error.strerror}; name a config file") from error
    if not is_there:
        raise InputError(explain_missing_config(path))
    module = _import_file(path_here)
    try:
        config = Config.of(module.get_config(variant) if variant else module.get_config())
    except (TypeError, ValueError) as error:  # it takes no variant, or not this one
        raise InputError(f"{file}: {error}") from error
    for key in values or {}:
        check_key(key)
    return config.with_values(values or {})


def _import_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"config_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise InputError(f"{path} is not a config file; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
