"""Where the config files are, and the config that has every key."""

import importlib
import importlib.machinery
import importlib.util
import sys
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from t5x_diffeq.runtime.config import Config

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
    """`configs/default.py`."""
    offer_configs()
    return importlib.import_module("configs.default").get_config()


def defaults() -> Config:
    """The defaults of all keys."""
    return Config.of(default_config())


def baseline_of(config: Config) -> Config:
    """The same config with the weights, scheme and step size of the per-layer baseline."""
    offer_configs()
    variant = importlib.import_module("configs.default").VARIANTS["baseline"]
    return config.with_values({f"model.{key}": value for key, value in variant.items()})


def config_file(name: str) -> Path:
    """`configs/NAME` in the current folder, or else the project's."""
    here, own = Path("configs", name), CONFIGS / name
    return own if own.exists() and not here.exists() else here


def values_of(name: str, variant: str) -> dict[str, Any]:
    """The values, by dotted key, of the config that `configs/NAME:variant` returns."""
    offer_configs()
    spec = importlib.util.spec_from_file_location(f"config_{Path(name).stem}", config_file(name))
    assert spec and spec.loader  # there is none for a file that doesn't end in .py
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return flatten(module.get_config(variant))


def flatten(config: ConfigDict, prefix: str = "") -> dict[str, Any]:
    """The config's values by dotted key."""
    flat: dict[str, object] = {}
    for key in config:
        value = config[key]
        deeper = isinstance(value, ConfigDict)
        flat.update(flatten(value, f"{prefix}{key}.") if deeper else {f"{prefix}{key}": value})
    return flat
