"""The config of a run: all keys, frozen.

`keys/` has a dataclass for each section, which says of each key its default, its meaning and the
values that it can take. Config files return a ConfigDict, whose values the command line can change.
A verb makes it a `Config` at once, and only `config_files` and `command_line` know ConfigDicts. A
key is checked whether or not the run uses it.
"""

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from operator import attrgetter
from typing import Any

from t5x_diffeq.config.keys.data import DataKeys
from t5x_diffeq.config.keys.key import Section, check_value, keys_of
from t5x_diffeq.config.keys.mesh import MeshKeys
from t5x_diffeq.config.keys.model import ModelKeys
from t5x_diffeq.config.keys.optimizer import OptimizerKeys
from t5x_diffeq.config.keys.run import RunKeys
from t5x_diffeq.config.keys.tasks import TasksKeys
from t5x_diffeq.config.keys.train import TrainKeys
from t5x_diffeq.system.errors import InputError


@dataclass(frozen=True)
class Config(RunKeys):
    """All keys; those that none sets have their defaults.

    Raises:
      InputError: if a key has a value that it can't take; names both, and what it can take.
    """

    model: ModelKeys = field(default_factory=ModelKeys)
    data: DataKeys = field(default_factory=DataKeys)
    train: TrainKeys = field(default_factory=TrainKeys)
    tasks: TasksKeys = field(default_factory=TasksKeys)
    optimizer: OptimizerKeys = field(default_factory=OptimizerKeys)
    mesh: MeshKeys = field(default_factory=MeshKeys)

    @classmethod
    def of(cls, nested: Any) -> "Config":
        """The config of a ConfigDict, or of the content of a `config.json`.

        Raises:
          InputError: if a key is missing, doesn't exist, or has a value that it can't take.
        """
        values = flatten(nested)
        check_complete(values.keys())
        return cls().with_values(values)

    def with_values(self, values: Mapping[str, object]) -> "Config":
        """The config with other values for some dotted keys.

        Raises:
          InputError: if a key can't take its value; names both, and what it can take.
        """
        of_section: dict[str, dict[str, Any]] = {}
        for key, value in values.items():
            section, _, name = key.rpartition(".")
            of_section.setdefault(section, {})[name] = _freeze(value)
        of_run = of_section.pop("", {})
        sections = {key: replace(getattr(self, key), **new) for key, new in of_section.items()}
        return replace(self, **of_run, **sections)

    def flat(self) -> dict[str, Any]:
        """The values by dotted key."""
        return {key: attrgetter(key)(self) for key in KEYS}

    def as_json(self) -> dict[str, Any]:
        """The config as read back from `config.json`: tuples become lists."""
        return json.loads(json.dumps(asdict(self)))


SECTIONS: dict[str, type[Section]] = {
    each.section: each
    for each in (ModelKeys, DataKeys, TrainKeys, TasksKeys, OptimizerKeys, MeshKeys)
}
KEYS = keys_of(RunKeys)
for _section in SECTIONS.values():
    KEYS |= keys_of(_section)


def flatten(config: Any) -> dict[str, Any]:
    """The values by dotted key of a ConfigDict, or of the content of a `config.json`."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if key in SECTIONS and hasattr(value, "items"):
            flat |= {f"{key}.{name}": each for name, each in value.items()}
        else:
            flat[key] = value
    return flat


def check_complete(keys: Collection[str]) -> None:
    """Checks that these are all keys of a config.

    Raises:
      InputError: if one is missing, or doesn't exist; names it.
    """
    for key in sorted(KEYS.keys() ^ keys):
        wrong = "is missing" if key in KEYS else "does not exist"
        raise InputError(f"config key {key!r} {wrong}; begin with configs.default.get_config()")


def check_vocab_size(stated: int | None, vocab_size: int) -> None:
    """Checks that `model.vocab_size`, if it is set, is the size of the tokenizer's vocabulary.

    Raises:
      InputError: if the sizes differ, naming both.
    """
    if stated not in (None, vocab_size):
        raise InputError(
            f"model.vocab_size is {stated}, and the tokenizer has {vocab_size} tokens; leave it "
            "None to take the tokenizer's"
        )


def check_values(values: Mapping[str, object], unset: Collection[str] = ()) -> None:
    """Checks that each key has a value that it can take.

    Args:
      values: the values by dotted key.
      unset: keys that may be None here although they must have a value in the end.

    Raises:
      InputError: if one hasn't; names the key, its value and what it can be.
    """
    for key, value in values.items():
        if value is not None or key not in unset:
            check_value(key, KEYS[key].values, value)


def _freeze(value: Any) -> Any:
    """The value with tuples for lists, which JSON has instead."""
    return tuple(map(_freeze, value)) if isinstance(value, list | tuple) else value
