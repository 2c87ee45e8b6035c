"""What a key is: its default, its meaning, the values that it can take, and what may change it.

A section of the config is a dataclass whose fields are keys:

    keep_checkpoints: Size = key(3, "newest checkpoints to keep", resume=True)

The annotation has the type and the `Values`, and `key` the rest, which is in the field's metadata.
"""

from dataclasses import dataclass, field, fields
from typing import Annotated, Any, ClassVar, Literal, get_type_hints

from t5x_diffeq.config.keys.values import INT32, STEPS, VOCABULARY, Values
from t5x_diffeq.system.errors import InputError


@dataclass(frozen=True)
class Key:
    """All there is to a key of a config.

    Attributes:
      values: the values that it can take.
      default: its value unless a config sets another.
      meaning: what it means, and what each value does; Markdown, whose links are those of docs/.
      resume: whether it may change when a run is resumed.
      branch: whether a branch may differ from its run in it, as in all that `resume` may change.
      finetune: whether `finetune` takes it from its own config (True), from the run that it tunes
        (False), or from its own if that has another value than the default ("if set").
    """

    values: Values
    default: Any
    meaning: str
    resume: bool
    branch: bool
    finetune: bool | Literal["if set"]


def key(
    default: Any,
    meaning: str,
    *,
    resume: bool = False,
    branch: bool = False,
    finetune: bool | Literal["if set"] = False,
) -> Any:
    """A field for a key; the arguments are the attributes of `Key`."""
    return field(
        default=default,
        metadata={
            "meaning": " ".join(meaning.split()),
            "resume": resume,
            "branch": branch or resume,
            "finetune": finetune,
        },
    )


def one_of(*choices: str) -> Values:
    """The values of a key that takes one of some words."""
    return Values(str, choices=choices)


Size = Annotated[int, Values(int, 1, INT32)]
SizeOrNone = Annotated[int | None, Values(int, 1, INT32, optional=True)]
Count = Annotated[int, Values(int, 0, INT32)]
CountOrNone = Annotated[int | None, Values(int, 0, INT32, optional=True)]
SolverSteps = Annotated[int, Values(int, 1, STEPS)]
SolverStepsOrNone = Annotated[int | None, Values(int, 1, STEPS, optional=True)]
VocabSize = Annotated[int, Values(int, 1, VOCABULARY)]
Positive = Annotated[float, Values(float, 0, open="(]")]
NotNegative = Annotated[float, Values(float, 0)]
Fraction = Annotated[float, Values(float, 0, 1)]
BelowOne = Annotated[float, Values(float, 0, 1, open="[)")]
Seconds = Annotated[float, Values(float, 1)]
Text = Annotated[str, Values(str)]
TextOrNone = Annotated[str | None, Values(str, optional=True)]
Texts = Annotated[tuple[str, ...], Values(tuple, entry=Values(str))]
Switch = Annotated[bool, Values(bool)]
Entries = Annotated[tuple, Values(tuple)]


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
    """Checks that a key has a value that it can take.

    Raises:
      InputError: if it hasn't; names the key, its value and what it can be.
    """
    if fault := values.fault(value):
        raise InputError(f"{dotted_key} is {value!r}; {fault}")


def _values_of(section: type[Section]) -> dict[str, Values]:
    hints = get_type_hints(section, include_extras=True).items()
    return {name: hint.__metadata__[0] for name, hint in hints if hasattr(hint, "__metadata__")}
