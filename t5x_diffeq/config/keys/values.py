"""What a key is: the values that it can take, its default, its meaning, and what may change it.

A section of the config is a dataclass whose fields are keys:

    keep_checkpoints: Size = key(3, resume=True)

The annotation has the type and the `Values`, and `key` the rest, which is in the field's metadata.
A string below says what the key means, and what each value does; it is Markdown, for `keys_page`.
Flags share the bounds of keys.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields
from math import inf
from typing import Annotated, Any, ClassVar, Literal, get_type_hints

from t5x_diffeq.system.errors import InputError

# Names that the command line must know before JAX is imported, which takes seconds. They are
# defined in model/ode (solvers.py, sources.py, time_basis.py, integrate.py), model/adaptive.py,
# model/layers/attention_kernels.py, and optimizer.py and moments.py of training/optimizers;
# where a file has a table of its names, tests/cli/bad_input_test.py compares the two.
SCHEMES = ("euler", "lie_trotter", "strang", "midpoint", "heun", "rk4")
ADAPTIVE_SOLVERS = ("bosh3", "tsit5", "dopri5", "dopri8")
KERNELS = ("xla", "cudnn", "triton", "splash")
REMATS = ("none", "dots", "full")
OPTIMIZERS = ("adam", "muon")
MOMENTS = ("float32", "bfloat16")
TIME_BASES = ("sinusoids", "legendre:k", "table:k")
WEIGHTS = ("time_dependent", "per_layer", "shared")
SOURCES = (  # of documents: data/sources.py, and what training reads besides
    *("stdlib", "text_files", "tfds", "wikitext103", "huggingface", "stream"),
    *("tokens", "mixture"),
)
CONVENTIONS = ("pair", "official", "full")  # of Lyapunov exponents: analysis/lyapunov.py

PLUGIN = "package.module:Name"  # the choice of a key that takes any importable name

STEP_RANGE = "FIRST:LAST"  # the choice of a key that takes the numbers of two steps

TEMPERATURES = (1e-3, 1e3)  # the lowest above 0 and the highest at which tokens are drawn
BEST = "best"  # in place of a step: the checkpoint with the lowest evaluation loss
INT32 = 2**31 - 1  # steps and positions are counted in 32 bits
FLOAT32 = 3.4e38  # about the largest number of the type
STEPS = 10_000  # solver steps
THREADS = 1024
SEEDS = 2**32
VOCABULARY = 2**30  # tokens, so that their number fits in 32 bits when padded
MOST_SHARDS = 99_999  # of a split: their names have five digits
_TYPE_WORDS = {
    int: "a whole number",
    float: "a number",
    str: "a text",
    bool: "True or False",
    tuple: "a tuple",
}
_TYPES = {int: int, float: int | float, str: str, bool: bool, tuple: tuple | list}  # JSON has lists


@dataclass(frozen=True)
class Values:
    """The values that a key can take.

    Attributes:
      type: the type of a value; an int is accepted for a float, a list for a tuple.
      most: the largest number; for a float, None is the largest float32.
      open: which bounds are excluded: "[)", "(]", "()", or "[]" for none.
      choices: of a string, or of each entry of a tuple; in `every:k` and the like, k is any integer
        of at least 1, in `keep:names`, names is a comma-separated list of words, in `c/N`, c is any
        number greater than 0, `FIRST:LAST` is two numbers, and `package.module:Name` is any
        importable name, with or without arguments (`config.plugins`).
      entry: the values that each entry of a tuple can take.
    """

    type: type
    least: float = -inf
    most: float | None = None
    open: str = "[]"
    choices: tuple[str, ...] = ()
    entry: "Values | None" = None
    optional: bool = False
    can_be_empty: bool = False

    def fault(self, value: object) -> str | None:
        """What is wrong with a value: `it must be at least 1`; None if nothing is."""
        if value is None and self.optional:
            return None
        is_switch = isinstance(value, bool)  # which Python takes for a number, too
        if not isinstance(value, _TYPES[self.type]) or is_switch != (self.type is bool):
            return self.fault_of_type()
        match value:
            case bool():
                return None
            case str():
                return self.fault_of_text(value)
            case tuple() | list():
                return self.fault_of_entries(value)
            case _:
                return self.fault_of_number(value)

    def fault_of_type(self) -> str:
        """`fault` for a value of another type."""
        example = "; Python writes a tuple as (A,) or (A, B)" if self.type is tuple else ""
        if PLUGIN in self.choices and self.type is str:
            example = f", such as an importable name, {PLUGIN!r}"
        return f"it must be {_TYPE_WORDS[self.type]}{' or None' if self.optional else ''}{example}"

    def fault_of_entries(self, values: Iterable[object]) -> str | None:
        """`fault` for a tuple: that of its first entry which has one."""
        entry = self.entry or (Values(str, choices=self.choices) if self.choices else None)
        faults = (entry.fault(each) for each in values) if entry else ()
        fault = next(filter(None, faults), None)
        return fault and f"of each entry, {fault}; () has no entries"

    def fault_of_text(self, value: str) -> str | None:
        """`fault` for a string."""
        if not self.choices:
            return None if value or self.can_be_empty else "it must not be empty; leave it out"
        if any(re.fullmatch(_pattern(choice), value) for choice in self.choices):
            return None
        words = ", ".join(self.choices)
        return f"it can be {words}{' with k of at least 1' if ':k' in words else ''}"

    def has_word(self, text: str) -> bool:
        """Whether a text is a choice that the package itself defines, so not an importable name."""
        own = (choice for choice in self.choices if choice != PLUGIN)
        return any(re.fullmatch(_pattern(choice), text) for choice in own)

    def fault_of_number(self, value: float) -> str | None:
        """`fault` for a number; NaN is out of every range."""
        most = FLOAT32 if self.most is None else self.most
        above = value > self.least if self.open[0] == "(" else value >= self.least
        below = value < most if self.open[1] == ")" else value <= most
        if above and below:
            return None
        if self.type is int:
            return f"it must be at most {most}" if above else f"it must be at least {self.least}"
        if self.most is not None:
            return f"it must be in {self.open[0]}{self.least}, {most}{self.open[1]}"
        bound = f"{'greater than' if self.open[0] == '(' else 'at least'} {self.least}, and "
        return f"it must be {bound if self.least > -inf else ''}finite in float32"


def _pattern(choice: str) -> str:
    if choice == PLUGIN:
        return r"[A-Za-z_][\w.]*:[A-Za-z_]\w*(\(.*\))?"
    if choice == STEP_RANGE:
        return r"\d{1,10}:\d{1,10}"
    if choice == "c/N":
        return r"(?=[^/]*[1-9])\d{1,9}(\.\d{1,9})?/N"
    number, names = r":0*[1-9]\d*", r":\w+(,\w+)*"
    return re.escape(choice).replace(":k", number).replace(":names", names)


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
TupleOfTexts = Annotated[tuple[str, ...], Values(tuple, entry=Values(str))]
Switch = Annotated[bool, Values(bool)]
Entries = Annotated[tuple, Values(tuple)]

# ------------------------------------------------------------------------------ keys


@dataclass(frozen=True)
class Key:
    """All there is to a key of a config."""

    values: Values  # the values that it can take
    default: Any
    resume: bool  # whether it may change when a run is resumed
    branch: bool  # whether a branch may have another value than the run that it branches off
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
        metadata={"resume": resume, "branch": branch or resume, "finetune": finetune, "asks": asks},
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
