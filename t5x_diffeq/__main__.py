"""Lists the verbs; with --completion, prints the script that completes them in a shell."""

import ast
import sys
from pathlib import Path

from t5x_diffeq.runtime import completion
from t5x_diffeq.runtime.version import __version__

VERBS = (
    "train",
    "finetune",
    "evaluate",
    "generate",
    "status",
    "prepare_data",
    "benchmark",
    "plan",
    "analyze",
    "export",
    "convert",
    "sweep",
    "reproduce",
    "make_tasks",
)


def summary(verb: str) -> str:
    """The first line of a verb's docstring, without importing it."""
    source = Path(__file__).with_name(f"{verb}.py").read_text()
    return (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0]


def main() -> None:
    """Prints the version, the completion script, or a line per verb."""
    if sys.argv[1:] == ["--version"]:
        print(f"t5x_diffeq {__version__}")
        return
    if sys.argv[1:] == ["--completion"]:
        print(completion.script(VERBS), end="")
        return
    print("python -m t5x_diffeq.<verb> --help")
    for verb in VERBS:
        print(f"  {verb:<12} {summary(verb)}")
    if sys.argv[1:] and sys.argv[1:] not in (["--help"], ["-h"]):
        print(f"error: {sys.argv[1]!r} is not understood; see the verbs above", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
