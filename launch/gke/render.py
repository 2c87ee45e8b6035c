"""Fills a manifest of this folder in: python render.py FILE NAME=VALUE ... [NAME+=VALUE ...] [--
ARGUMENT ...]

`${NAME}` becomes the value as a YAML scalar; a line whose value is empty is left out. The lines
from `# if NAME` to `# end` are left out too when the value of NAME is empty. The lines from `#
each NAME` to `# end` are repeated for every `NAME+=KEY=VALUE`, with `${KEY}` and `${VALUE}`. `#
each ARGUMENTS` repeats its lines for each ARGUMENT. Values are quoted for YAML. In arguments and
variables, `$(...)` is escaped: Kubernetes would replace it by a variable's value.
"""

import json
import re
import sys
from pathlib import Path

PLACEHOLDER = re.compile(r"\$\{(\w+)\}")
BLOCK = re.compile(r"\s*# (if|each) (\w+)")
END = re.compile(r"\s*# end")
EACH = {"KEY", "VALUE"}


def quote(value: str) -> str:
    """A quoted text of YAML. YAML has JSON's escapes, except those of letters beyond two bytes."""
    return json.dumps(value, ensure_ascii=False)


def format_scalar(value: str) -> str:
    """A YAML scalar: numbers as they are, everything else in quotes."""
    return value if re.fullmatch(r"0|[1-9]\d{0,8}", value) else quote(value)


def fill(line: str, values: dict[str, str]) -> list[str]:
    """The line with its values; no line if one of them is empty."""
    if any(not values[name] for name in PLACEHOLDER.findall(line) if name not in EACH):
        return []

    def value_of(match: re.Match) -> str:
        name = match.group(1)
        return quote(values[name]) if name in EACH else format_scalar(values[name])

    return [PLACEHOLDER.sub(value_of, line)]


def item(text: str) -> dict[str, str]:
    """KEY and VALUE of one repetition, safe from Kubernetes' own `$(...)`."""
    key, _, value = text.partition("=")
    return {"KEY": key, "VALUE": value.replace("$", "$$")}


def block(lines: list[str]) -> tuple[list[str], list[str]]:
    """The lines up to the `# end` of the block that was just opened, and the lines after it.

    Raises:
      ValueError: if the block has no end.
    """
    depth = 1
    for number, line in enumerate(lines):
        depth += bool(BLOCK.fullmatch(line)) - bool(END.fullmatch(line))
        if depth == 0:
            return lines[:number], lines[number + 1 :]
    raise ValueError("a block has no `# end`")


def expand(lines: list[str], values: dict[str, str], lists: dict[str, list]) -> list[str]:
    """The lines with all blocks and values in place."""
    result = []
    while lines:
        line, lines = lines[0], lines[1:]
        opened = BLOCK.fullmatch(line)
        if not opened:
            result += fill(line, values)
            continue
        inner, lines = block(lines)
        kind, name = opened.groups()
        if kind == "each":
            for each in lists.get(name, []):
                result += expand(inner, values | each, lists)
        elif values.get(name) or lists.get(name):
            result += expand(inner, values, lists)
    return result


def render(
    text: str,
    values: dict[str, str],
    arguments: list[str],
    lists: dict[str, list[str]] | None = None,
) -> str:
    """The manifest.

    Raises:
      ValueError: if a placeholder has no value, or a value no placeholder.
    """
    lines = text.splitlines()
    blocks = [opened.groups() for line in lines if (opened := BLOCK.fullmatch(line))]
    names = {name for kind, name in blocks if kind == "if"} | set(PLACEHOLDER.findall(text))
    repeated = {name for kind, name in blocks if kind == "each"} - {"ARGUMENTS"}
    names -= EACH | repeated
    wrong = (names ^ set(values)) | (set(lists or {}) - repeated)
    if wrong:
        raise ValueError(f"placeholders and values differ: {sorted(wrong)}")
    items = {name: [item(each) for each in texts] for name, texts in (lists or {}).items()}
    items["ARGUMENTS"] = [{**item(""), "VALUE": each.replace("$", "$$")} for each in arguments]
    return "\n".join(expand(lines, values, items)) + "\n"


def main(file: str, *words: str) -> None:
    """Prints the manifest."""
    end = words.index("--") if "--" in words else len(words)
    values: dict[str, str] = {}
    lists: dict[str, list[str]] = {}
    for word in words[:end]:
        name, _, value = word.partition("=")
        if name.endswith("+"):
            lists.setdefault(name[:-1], []).append(value)
        else:
            values[name] = value
    sys.stdout.reconfigure(encoding="utf-8")  # type: ignore[union-attr]
    print(
        render(Path(file).read_text(encoding="utf-8"), values, list(words[end + 1 :]), lists),
        end="",
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
