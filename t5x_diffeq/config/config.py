"""The config of a run: all keys, frozen.

`keys/` has a dataclass for each section, which says of each key its default, its meaning and the
values that it can take. Config files return a ConfigDict, whose values the command line can change.
A verb makes it a `Config` at once, and only `config_files` and `command_line` know ConfigDicts. A
key is checked whether or not the run uses it.
"""

import ast
import json
from collections.abc import Collection, Mapping
from dataclasses import FrozenInstanceError, asdict, dataclass, field, replace
from difflib import get_close_matches
from operator import attrgetter
from os import PathLike, fspath
from typing import Any

from t5x_diffeq.config.keys.data import DataKeys
from t5x_diffeq.config.keys.model import ModelKeys
from t5x_diffeq.config.keys.optimizer import OptimizerKeys
from t5x_diffeq.config.keys.run import MeshKeys, RunKeys
from t5x_diffeq.config.keys.train import TrainKeys
from t5x_diffeq.config.keys.values import Section, Values, check_value, dotted, keys_of
from t5x_diffeq.config.other_names import OTHER_NAMES
from t5x_diffeq.system.errors import InputError
from t5x_diffeq.system.files import AnyPath

CONFIG_FILE = "config.json"  # of a run, in its workdir
TUNES = (
    "this config begins with another run's model (config.init_from); give it to "
    "`python -m t5x_diffeq.finetune`"
)
_SWITCHES = {"true": True, "false": False}


@dataclass(frozen=True)
class Config(RunKeys):
    """All keys, with their defaults; an InputError if one has a value that it can't take."""

    model: ModelKeys = field(default_factory=ModelKeys)
    data: DataKeys = field(default_factory=DataKeys)
    train: TrainKeys = field(default_factory=TrainKeys)
    optimizer: OptimizerKeys = field(default_factory=OptimizerKeys)
    mesh: MeshKeys = field(default_factory=MeshKeys)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, section in SECTIONS.items():
            if not isinstance(value := getattr(self, name), section):
                raise InputError(
                    f"{name}={value!r:.60}; it must be a {section.__name__}; load_config(file, "
                    f"{{'{name}.KEY': VALUE}}) sets its keys"
                )

    @classmethod
    def of(cls, nested: Any) -> "Config":
        """The config of a ConfigDict or a `config.json`; an InputError if a key is invalid."""
        values = flatten(nested)
        check_complete(values.keys())
        if values["model.num_steps"] is None:
            raise InputError(f"model.num_steps is None; {TUNES}")
        return cls().with_values(values)

    def with_values(self, values: Mapping[str, object]) -> "Config":
        """The config with other values for some dotted keys.

        Raises:
          InputError: if a key doesn't exist or can't take its value.
        """
        if not isinstance(values, Mapping):
            raise InputError(f"values={values!r} must be a dict, as {{'train.total_steps': 100}}")
        by_section: dict[str, dict[str, Any]] = {}
        for key, value in values.items():
            check_key(key)
            section, _, name = key.rpartition(".")
            by_section.setdefault(section, {})[name] = plain_value(value)
        run_keys = by_section.pop("", {})
        sections = {key: replace(getattr(self, key), **new) for key, new in by_section.items()}
        return replace(self, **run_keys, **sections)

    def flat(self) -> dict[str, Any]:
        """The values by dotted key."""
        return {key: attrgetter(key)(self) for key in KEYS}

    def as_json(self) -> dict[str, Any]:
        """The config as read back from `config.json`: tuples become lists."""
        return json.loads(json.dumps(asdict(self)))


def is_run(folder: AnyPath) -> bool:
    """Whether a folder is the workdir of a run: whether it holds a config."""
    return (folder / CONFIG_FILE).exists()


def _refuse_change(config: Section, name: str, value: object) -> None:
    raise FrozenInstanceError(
        f"a Config can't be changed; config.with_values({{'{dotted(config.section, name)}': "
        f"{value!r:.60}}}) returns one with the other value"
    )


def _refuse_items(config: Section, name: object) -> None:
    raise TypeError(
        f"a Config has attributes, and no item {name!r}: write config.train.total_steps, or "
        "config.flat()['train.total_steps']"
    )


def _explain_attribute(config: Section, name: str) -> None:
    if name.startswith("_"):  # which libraries look for
        raise AttributeError(name)
    if name in ("config", config.section) and config.section:
        raise AttributeError(
            f"this is config.{config.section} already, which has no {name!r}; leave that out"
        )
    if config.section or keys_meant(name):
        raise AttributeError(explain_unknown_key(dotted(config.section, name)))
    raise AttributeError(
        f"a Config has no attribute {name!r}; with_values({{'train.total_steps': 100}}) returns "
        "one with other values, and flat() has the values of all keys"
    )


SECTIONS: dict[str, type[Section]] = {
    each.section: each for each in (ModelKeys, DataKeys, TrainKeys, OptimizerKeys, MeshKeys)
}
for _kind in (Config, *SECTIONS.values()):
    _kind.__setattr__ = _refuse_change  # type: ignore[assignment]
    for _name, _refuse in (
        ("__setitem__", _refuse_change),
        ("__getitem__", _refuse_items),
        ("__getattr__", _explain_attribute),
    ):
        setattr(_kind, _name, _refuse)
KEYS = keys_of(RunKeys)
for _section in SECTIONS.values():
    KEYS |= keys_of(_section)


def flatten(config: Any) -> dict[str, Any]:
    """The values by dotted key of a ConfigDict, or of the content of a `config.json`."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        named = {key: value}
        if key in SECTIONS and hasattr(value, "items"):
            named = {f"{key}.{name}": each for name, each in value.items()}
        if twice := sorted(flat.keys() & named):
            name = twice[0]
            raise InputError(f"{name} is given twice, as {flat[name]!r} and as {named[name]!r}")
        flat |= named
    return flat


def check_key(key: str) -> None:
    """Raises an InputError unless this is a key of a config."""
    if key not in KEYS:
        raise InputError(explain_unknown_key(key))


def explain_unknown_key(key: str) -> str:
    """One line for a key that doesn't exist: what may be meant."""
    if key.rstrip(".") in SECTIONS:
        return (
            f"{key!r} is a section of the config, and no key; its keys are {key.rstrip('.')}.NAME"
        )
    meant = keys_meant(key) or _most_similar(key)
    meant = [each for each in meant if each in KEYS] or meant
    hint = f"did you mean {' or '.join(meant)}?" if meant else "`train --help=keys` prints all keys"
    return f"config key {key!r} does not exist; {hint}"


def keys_meant(name: str) -> list[str]:
    """What a name surely means: keys, a flag such as `--workdir`, or another way to set the same.

    They are the keys of this name, in any section, and flags that other projects call so; or else
    all that other projects call so; or else the keys whose words begin with these letters (`wd`).
    """
    last = name.rpartition(".")[2].replace("-", "_").lower()
    words = {each: each.rpartition(".")[2] for each in KEYS}
    same = [each for each, word in words.items() if last == word]
    others = OTHER_NAMES.get(last, [])
    if same:
        return same + [each for each in others if each.startswith("--")]
    return others or [each for each, word in words.items() if last and last == _initials(word)]


def _most_similar(key: str) -> list[str]:
    """The key or section with the most similar name, in this project or in another one."""
    names = {name: meant for name, (meant, *_) in OTHER_NAMES.items()}
    names |= {each.rpartition(".")[2]: each for each in KEYS} | {each: each for each in SECTIONS}
    last = key.replace("-", "_").rpartition(".")[2]
    return [names[near] for near in get_close_matches(last, names, n=1)]


def _initials(name: str) -> str:
    """`lr` of `learning_rate`; empty for a single word."""
    words = name.split("_")
    return "".join(word[0] for word in words) if len(words) > 1 else ""


def check_complete(keys: Collection[str]) -> None:
    """Raises an InputError unless these are all keys of a config."""
    for key in sorted(KEYS.keys() ^ keys):
        if key not in KEYS:
            raise InputError(f"{explain_unknown_key(key)} A config file can't add keys")
        raise InputError(f"config key {key!r} is missing; begin with configs.default.get_config()")


def check_vocab_size(stated: int | None, vocab_size: int) -> None:
    """Raises an InputError if `model.vocab_size` is set and isn't the tokenizer's."""
    if stated not in (None, vocab_size):
        raise InputError(
            f"model.vocab_size is {stated}, and the tokenizer has {vocab_size} tokens; leave it "
            "None to take the tokenizer's"
        )


def check_values(values: Mapping[str, object], unset: Collection[str] = ()) -> None:
    """Raises an InputError if a dotted key has a value that it can't take.

    Keys that are `unset` may be None here although they must have a value in the end.
    """
    for key, value in values.items():
        if value is not None or key not in unset:
            check_value(key, KEYS[key].values, value)


def parse_value(key: str, text: str) -> Any:
    """The value that a text means for a key, as in `--grid`.

    Raises:
      InputError: if it isn't of the key's type, or the key can't take it.
    """
    value = _parse_as(KEYS[key].values, text)
    check_values({key: value})
    return value


def _parse_as(values: Values, text: str) -> Any:
    """The text as a value of the type; a text of another type as it is, for `check_value`."""
    if values.optional and text == "None":
        return None
    try:
        if values.type is bool:
            return _SWITCHES[text.lower()]
        if values.type is tuple:
            return tuple(ast.literal_eval(text))
        return values.type(text)
    except (ValueError, TypeError, SyntaxError, KeyError):
        return text


def plain_value(value: Any) -> Any:
    """The value with tuples in place of JSON's lists, and Python's types of NumPy's and JAX's.

    A path becomes its text.
    """
    if isinstance(value, list | tuple):
        return tuple(map(plain_value, value))
    if hasattr(value, "dtype"):  # np.float32, jnp.bfloat16; a number or an array of such a type
        return value.__name__ if isinstance(value, type) else plain_value(value.tolist())
    if isinstance(value, PathLike):
        return fspath(value)
    return value.name if hasattr(value, "itemsize") else value  # of np.dtype
