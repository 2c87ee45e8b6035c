"""Imports go down only, and the mathematics knows neither config files nor data."""

import ast

import pytest
from conftest import ROOT

from t5x_diffeq.__main__ import VERBS

RANK = {"ode": 0, "layers": 0, "models": 1}
RANK |= {"training": 2, "analysis": 2, "data": 2, "exchange": 3, "experiments": 3, "verbs": 4}
LIBRARIES_OF_EDGES = {"ml_collections", "grain", "sentencepiece", "tensorflow_datasets", "orbax"}
BASE = ("config_files", "config_keys", "errors", "files", "locks", "staging", "report")
BASE += ("agreement", "allocator", "array_types", "peers", "processes")
PACKAGE = ROOT / "t5x_diffeq"


def imported(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("part", [p for p in RANK if (PACKAGE / p).is_dir()])
def test_imports_go_down(part):
    for path in (PACKAGE / part).glob("*.py"):
        for name in imported(path):
            package, _, rest = name.partition(".")
            other = rest.partition(".")[0]
            if rest == "__version__":
                continue
            if package == "t5x_diffeq" and (PACKAGE / f"{other}.py").exists():
                assert other in BASE or part == "verbs", (path, name)
                assert other not in VERBS, (path, name)
            elif package == "t5x_diffeq" and other != part:
                assert RANK[other] < RANK[part] or {part, other} == {"ode", "layers"}, (path, name)
            if RANK[part] < 2:
                assert package not in LIBRARIES_OF_EDGES, (path, name)
