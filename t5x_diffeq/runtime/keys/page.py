"""Writes the page of all keys: `python -m t5x_diffeq.runtime.keys.page > configs/keys.md`."""

from t5x_diffeq.runtime.config import SECTIONS
from t5x_diffeq.runtime.keys.key import Key, Section, keys_of
from t5x_diffeq.runtime.keys.run import RunKeys
from t5x_diffeq.runtime.keys.values import INT32, Values

_HEAD = """\
# Keys

Every key of a config: its default, its meaning, the values that it can take, and where it may
differ. A meaning begins with the default's, and says after each | what another value means.
[README.md](README.md) helps to choose.

May differ in

- resume: the same workdir, trained again. These keys decide neither which parameters the model has
  nor in which order it sees the data.
- branch: a run that goes on from another's checkpoint (`train --branch_from`). The optimizer's
  state doesn't depend on these keys, nor does the order of the data.
- finetune: the tuning of a run's model. The other keys, those of the model and the tokenizer, are
  the run's.
- finetune if set: likewise, but it is the run's unless it is set to another value than the default.

The page is made from [t5x_diffeq/runtime/keys](../t5x_diffeq/runtime/keys), where a key is added or
changed:

    python -m t5x_diffeq.runtime.keys.page > configs/keys.md
"""
_TABLE = "| key | default | meaning | values | may differ in |\n|---|---|---|---|---|"


def page() -> str:
    """The page, in Markdown."""
    tables = [_table_of(RunKeys), *map(_table_of, SECTIONS.values())]
    return "\n".join([_HEAD, *tables])


def _table_of(section: type[Section]) -> str:
    rows = (_row(name, key) for name, key in keys_of(section).items())
    title = f"## config.{section.section}".rstrip(".")
    return "\n".join([title, "", str(section.__doc__), "", _TABLE, *rows, ""])


def _row(name: str, key: Key) -> str:
    where = {
        "resume": key.resume,
        "branch": key.branch,
        "finetune": key.finetune is True,
        "finetune if set": key.finetune == "if set",
    }
    differs = ", ".join(word for word, may in where.items() if may)
    cells = (f"`{name}`", f"`{key.default}`", key.meaning, in_words(key.values), differs)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def in_words(values: Values) -> str:
    """The values that a key can take."""
    return _without_none(values) + (", or None" if values.optional else "")


def _without_none(values: Values) -> str:
    choices = ", ".join(f"`{choice}`" for choice in values.choices)
    if values.type is bool:
        return "True or False"
    if values.type is str:
        return choices or "a text"
    if values.type is tuple:
        entry = choices or (in_words(values.entry) if values.entry else "")
        return f"a tuple; each entry: {entry}" if entry else "a tuple"
    return f"{'a whole number' if values.type is int else 'a number'}, {_range(values)}"


def _range(values: Values) -> str:
    if values.most is None or values.most == INT32:
        return f"{'greater than' if values.open[0] == '(' else 'at least'} {values.least}"
    if values.type is int:
        return f"{values.least} to {values.most}"
    return f"in {values.open[0]}{values.least}, {values.most}{values.open[1]}"


if __name__ == "__main__":
    print(page(), end="")
