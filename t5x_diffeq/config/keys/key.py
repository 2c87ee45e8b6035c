"""What a key is: its default, its meaning, the values that it can take, and what may change it.

A section of the config is a dataclass whose fields are keys:

    keep_checkpoints: Size = key(3, resume=True)

The annotation has the type and the `Values`, and `key` the rest, which is in the field's metadata.
A string below says what the key means, and what each value does; it is Markdown, for `keys_page`.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal, get_type_hints

from t5x_diffeq.config.keys.values import Values
from t5x_diffeq.system.errors import InputError


@dataclass(frozen=True)
class Key:
    """All there is to a key of a config."""

    values: Values  # that it can take
    default: Any
    resume: bool  # whether it may change when a run is resumed
    branch: bool  # whether a branch may differ from its run in it
    # Whether `finetune` takes the value from its own config (True), from the run that it tunes
    # (False), or from its own config if the value there isn't the default ("if set").
    finetune: bool | Literal["if set"]
    # The texts in a value that can lead to code, so that a person must have given them. None: all
    # texts but the words of `values`, which is the safe default for a new key.
    asks: Callable[[Any], Iterable[str]] | None

    def texts_to_ask_for(self, value: object) -> list[str]:
        """The texts of a value that can lead to code (see `plugins.check_trusted`)."""
        if self.asks:
            return list(self.asks(value))
        return [text for text in texts_in(value) if not self.values.has_word(text)]


def reads_as_data(value: object) -> Iterable[str]:
    """`Key.asks` of a key whose texts are looked up or read as data, and so lead to no code."""
    return ()


def texts_in(value: object) -> Iterator[str]:
    """The texts of a value, which may come from anybody's JSON."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from texts_in(each)


def key(
    default: Any,
    *,
    resume: bool = False,
    branch: bool = False,
    finetune: bool | Literal["if set"] = False,
    asks: Callable[[Any], Iterable[str]] | None = None,
) -> Any:
    """A field for a key; the arguments are the attributes of `Key`."""
    return field(
        default=default,
        metadata={
            "resume": resume,
            "branch": branch or resume,
            "finetune": finetune,
            "asks": asks,
        },
    )


@dataclass(frozen=True)
class Section:
    """Raises an `InputError` if a key has a value that it can't take."""

    section: ClassVar[str] = ""

    def __post_init__(self) -> None:
        for name, values in _values_of(type(self)).items():
            check_value(dotted(self.section, name), values, getattr(self, name))


def keys_of(section: type[Section]) -> dict[str, Key]:
    """The keys of a section, by dotted key."""
    values = _values_of(section)
    return {
        dotted(section.section, each.name): Key(values[each.name], each.default, **each.metadata)
        for each in fields(section)
        if each.name in values
    }


def dotted(section: str, name: str) -> str:
    """`model.num_steps`; `seed`, which is in no section."""
    return f"{section}.{name}" if section else name


def check_value(dotted_key: str, values: Values, value: object) -> None:
    """Raises an InputError if a key has a value that it can't take."""
    if fault := values.fault(value):
        raise InputError(f"{dotted_key} is {value!r}; {fault}")


def _values_of(section: type[Section]) -> dict[str, Values]:
    hints = get_type_hints(section, include_extras=True).items()
    return {name: hint.__metadata__[0] for name, hint in hints if hasattr(hint, "__metadata__")}
