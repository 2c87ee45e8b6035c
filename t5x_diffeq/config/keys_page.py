"""What all keys are, for the page and for `--help=KEY`.

`python -m t5x_diffeq.config.keys_page > docs/keys.md` writes the page.
"""

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from itertools import pairwise

from t5x_diffeq.config.config import KEYS, SECTIONS, keys_meant
from t5x_diffeq.config.keys.run import RunKeys
from t5x_diffeq.config.keys.values import INT32, Section, Values, keys_of
from t5x_diffeq.config.mistakes import nearest
from t5x_diffeq.config.unread import UNREAD
from t5x_diffeq.system.errors import InputError

_HEAD = """\
---
search: {boost: 6}
---

# Every key

A config has the sections below. `--config.model.num_steps=12` on the command line sets a key;
[Configuring](configuring.md) has the other ways, and the keys that you will change most often.

Below the name of a key are its default, the values that it can take, and where it may differ:

| word | the key may differ |
|---|---|
| resume | between runs of one workdir. Changing any other key of a run is an error. |
| branch | in a run that continues from another run's checkpoint (`train --branch_from`) |
| finetune | in the tuning of a run's model. All other keys are those of the run. |
| finetune if set | likewise, if its value isn't the default; otherwise it has the run's value |

This page is generated from `t5x_diffeq/config/keys/`, where a key is added or changed:

```bash
python -m t5x_diffeq.config.keys_page > docs/keys.md
```
"""
_DIFFERS = (
    "A key may differ between runs of one workdir (resume), in a run that branches off another "
    "(branch), or in the tuning of another run (finetune)."
)
_ALL: tuple[type[Section], ...] = (RunKeys, *SECTIONS.values())


def page() -> str:
    """The page, in Markdown."""
    return "\n".join([_HEAD, *map(_part, _ALL)])


def help_of(word: str, columns: int) -> str:
    """The keys that a word names, as plain text in lines of so many columns.

    Args:
      word: "keys" for all, a section, or a key with or without its section.

    Raises:
      InputError: if it names no key.
    """
    name, lines = word.removeprefix("config."), []
    for section in _ALL:
        whole_section = name in ("keys", section.section)
        if whole_section and section.section:
            lines += [*textwrap.wrap(_plain(str(section.__doc__)), columns), ""]
        for key, default, values, meaning, differs in _rows(section):
            if whole_section or name in (key, key.rpartition(".")[2]):
                may = f". May differ in: {differs}" if differs else ""
                texts = (f"Default {default}; {values}{may}.", f"{meaning}.")
                lines.append(key)
                for text in texts:
                    lines += [f"    {line}" for line in textwrap.wrap(_plain(text), columns - 4)]
                lines.append("")
    if not lines:
        bare = sorted({key.rpartition(".")[2] for key in KEYS})
        near = keys_meant(name) or nearest(name, KEYS if "." in name else [*SECTIONS, *bare])
        hint = f"did you mean {' or '.join(near)}?" if near else "--help=keys prints all keys"
        raise InputError(f"--help={word}: there is no such key or section; {hint}")
    return "\n".join([*lines, *textwrap.wrap(_DIFFERS, columns)])


def _plain(markdown: str) -> str:
    return re.sub(r"\[(.*?)\]\(.*?\)", r"\1", " ".join(markdown.split())).replace("`", "")


def _meanings_of(section: type[Section]) -> list[str]:
    """What each key of a section means: the string below it."""
    (section_class,) = ast.parse(inspect.getsource(section)).body
    assert isinstance(section_class, ast.ClassDef)
    pairs = pairwise(section_class.body)
    below = [text for key, text in pairs if isinstance(key, ast.AnnAssign)]
    return [" ".join(str(ast.literal_eval(ast.unparse(text))).split()) for text in below]


def _part(section: type[Section]) -> str:
    within = section.section
    title = f"## config.{within} {{#{within}}}" if within else "## config"
    lines = [title, "", str(section.__doc__), ""]
    for name, default, values, meaning, differs in _rows(section):
        may = differs and f"may differ: *{differs.replace(', ', '*, *')}*"
        facts = " · ".join(filter(None, (f"default {default}", values, may, *_unread(name))))
        lines += [f"### `{name}` {{#{name}}}", "", facts, "", meaning, ""]
    return "\n".join(lines)


def _unread(name: str) -> Iterator[str]:
    """The values of other keys with which a key is not read."""
    for keys, other, values in UNREAD:
        if name in keys:
            words = "`0`" if values.type is int else _in_words(values)
            yield f"not read with `{other}`: {words}"


def _rows(section: type[Section]) -> Iterator[tuple[str, str, str, str, str]]:
    """Of each key its name, default, values, meaning, and where it may differ, in Markdown."""
    for (name, key), meaning in zip(keys_of(section).items(), _meanings_of(section), strict=True):
        where = {
            "resume": key.resume,
            "branch": key.branch,
            "finetune": key.finetune is True,
            "finetune if set": key.finetune == "if set",
        }
        differs = ", ".join(word for word, may in where.items() if may)
        yield name, f"`{key.default}`", _in_words(key.values), meaning, differs


def _in_words(values: Values) -> str:
    """The values that a key can take."""
    return _without_none(values) + (", or `None`" if values.optional else "")


def _without_none(values: Values) -> str:
    choices = ", ".join(f"`{choice}`" for choice in values.choices)
    if values.type is bool:
        return "`True`, `False`"
    if values.type is str:
        return choices or "text"
    if values.type is tuple:
        entry = choices or (_in_words(values.entry) if values.entry else "")
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
