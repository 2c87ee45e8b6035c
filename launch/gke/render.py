"""Fills a manifest of this folder in: python render.py FILE NAME=VALUE ... [-- ARGUMENT ...]

`${NAME}` becomes the value as a YAML scalar; a line whose value is empty is left out. The line
`- ${ARGUMENTS}` becomes one line for each of what follows `--`. Nothing in a value has a meaning
for YAML, nor `$(...)` in an argument for Kubernetes, which would put variables in its place.
"""

import json
import re
import sys
from pathlib import Path

PLACEHOLDER = re.compile(r"\$\{(\w+)\}")


def quoted(value: str) -> str:
    """A text of YAML: JSON's escapes are YAML's too, but for letters beyond two bytes."""
    return json.dumps(value, ensure_ascii=False)


def scalar(value: str) -> str:
    """A YAML scalar: numbers as they are, everything else in quotes."""
    return value if re.fullmatch(r"0|[1-9]\d{0,8}", value) else quoted(value)


def filled(line: str, values: dict[str, str], arguments: list[str]) -> list[str]:
    """What a line of the manifest becomes."""
    names = PLACEHOLDER.findall(line)
    if "ARGUMENTS" in names:
        escaped = [value.replace("$", "$$") for value in arguments]
        return [line.replace("${ARGUMENTS}", quoted(value)) for value in escaped]
    if any(not values[name] for name in names):
        return []
    return [PLACEHOLDER.sub(lambda match: scalar(values[match.group(1)]), line)]


def render(text: str, values: dict[str, str], arguments: list[str]) -> str:
    """The manifest.

    Raises:
      ValueError: if a placeholder has no value, or a value no placeholder.
    """
    names = set(PLACEHOLDER.findall(text)) - {"ARGUMENTS"}
    if names != set(values):
        raise ValueError(f"placeholders and values differ: {sorted(names ^ set(values))}")
    lines = [new for line in text.splitlines() for new in filled(line, values, arguments)]
    return "\n".join(lines) + "\n"


def main(file: str, *words: str) -> None:
    """Prints it."""
    end = words.index("--") if "--" in words else len(words)
    values = dict(word.split("=", 1) for word in words[:end])
    sys.stdout.reconfigure(encoding="utf-8")
    print(render(Path(file).read_text(), values, list(words[end + 1 :])), end="")


if __name__ == "__main__":
    main(*sys.argv[1:])
