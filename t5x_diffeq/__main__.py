"""Runs a verb, or lists them."""

import ast
import sys
from difflib import get_close_matches
from pathlib import Path

from t5x_diffeq.cli import VERBS, run_verb
from t5x_diffeq.system.extras import __version__


def summary(verb: str) -> str:
    """The first line of a verb's docstring, without importing it."""
    source = (Path(__file__).parent / "cli" / f"{verb}.py").read_text("utf-8")
    return (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0]


def list_verbs() -> str:
    """A line per verb."""
    lines = (f"  {verb:<12} {summary(verb)}" for verb in VERBS)
    return "\n".join(("python -m t5x_diffeq VERB --help", *lines))


def main() -> None:
    """Runs the verb that the first argument names, with the arguments after it."""
    first, *rest = sys.argv[1:] or ["--help"]
    if first in ("--help", "-h", "help") and rest[:1] and rest[0] in VERBS:
        first = sys.argv[1] = rest[0]
        sys.argv[2:] = ["--help"]
    if first in VERBS:
        del sys.argv[1]
        run_verb(first)
    elif first == "--version":
        print(f"t5x_diffeq {__version__}")
    elif first in ("--help", "-h", "help"):
        print(list_verbs())
    elif first.startswith("-") and (verbs := [each for each in rest if each in VERBS]):
        hint = f"write python -m t5x_diffeq {verbs[0]} {first}"
        print(f"error: the verb comes before its flags; {hint}", file=sys.stderr)
        sys.exit(2)
    else:
        near = get_close_matches(first, VERBS, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else "see the verbs above"
        if not near:
            print(list_verbs())
        print(f"error: there is no verb {first!r}; {hint}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
