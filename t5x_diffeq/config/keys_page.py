"""Writes the page of all keys: `python -m t5x_diffeq.config.keys_page > docs/keys.md`."""

import ast
import inspect
from itertools import pairwise

from t5x_diffeq.config.config import SECTIONS
from t5x_diffeq.config.keys.key import Key, Section, keys_of
from t5x_diffeq.config.keys.run import RunKeys
from t5x_diffeq.config.keys.values import INT32, Values

_HEAD = """\
---
search: {boost: 6}
---

# Every key

A config has the sections below. `--config.model.num_steps=12` on the command line sets a key;
[Configuring](configuring.md) has the other ways, and the twenty keys that you will touch most.

Below its name stand a key's default, the values that it can take, and where it may differ:

| word | the key may differ |
|---|---|
| resume | between runs of one workdir. Changing any other key of a run is an error. |
| branch | in a run that continues from another run's checkpoint (`train --branch_from`) |
| finetune | in the tuning of a run's model. All other keys are those of the run. |
| finetune if set | likewise if set to another value than the default; else it is the run's |

This page is generated from `t5x_diffeq/config/keys/`, where a key is added or changed:

```bash
python -m t5x_diffeq.config.keys_page > docs/keys.md
```
"""


def page() -> str:
    """The page, in Markdown."""
    return "\n".join([_HEAD, _part(RunKeys), *map(_part, SECTIONS.values())])


def meanings_of(section: type[Section]) -> list[str]:
    """What each key of a section means: the string below it."""
    (section_class,) = ast.parse(inspect.getsource(section)).body
    assert isinstance(section_class, ast.ClassDef)
    pairs = pairwise(section_class.body)
    below = [text for key, text in pairs if isinstance(key, ast.AnnAssign)]
    return [" ".join(str(ast.literal_eval(ast.unparse(text))).split()) for text in below]


def _part(section: type[Section]) -> str:
    keys = zip(keys_of(section).items(), meanings_of(section), strict=True)
    entries = (_entry(name, key, meaning) for (name, key), meaning in keys)
    within = section.section
    title = f"## config.{within} {{#{within}}}" if within else "## config"
    return "\n".join([title, "", str(section.__doc__), "", *entries])


def _entry(name: str, key: Key, meaning: str) -> str:
    where = {
        "resume": key.resume,
        "branch": key.branch,
        "finetune": key.finetune is True,
        "finetune if set": key.finetune == "if set",
    }
    differs = ", ".join(f"*{word}*" for word, may in where.items() if may)
    facts = [f"default `{key.default}`", in_words(key.values), differs and f"may differ: {differs}"]
    return "\n".join(
        [f"### `{name}` {{#{name}}}", "", " · ".join(filter(None, facts)), "", meaning, ""]
    )


def in_words(values: Values) -> str:
    """The values that a key can take."""
    return _without_none(values) + (", or `None`" if values.optional else "")


def _without_none(values: Values) -> str:
    choices = ", ".join(f"`{choice}`" for choice in values.choices)
    if values.type is bool:
        return "`True`, `False`"
    if values.type is str:
        return choices or "text"
    if values.type is tuple:
        entry = choices or (in_words(values.entry) if values.entry else "")
        return f"a tuple of {entry}" if entry else "a tuple"
    return f"{'integer' if values.type is int else 'number'}, {_range(values)}"


def _range(values: Values) -> str:
    if values.most is None or values.most == INT32:
        return f"{'greater than' if values.open[0] == '(' else 'at least'} {values.least}"
    if values.type is int:
        return f"{values.least} to {values.most}"
    return f"in {values.open[0]}{values.least:g}, {values.most:g}{values.open[1]}"


if __name__ == "__main__":
    print(page(), end="")
