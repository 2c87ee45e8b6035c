"""The rooms of the package: a file for each verb, imports that go down only."""

import ast
import re

import pytest
from helpers import ROOT

from t5x_diffeq.cli import VERBS

FLOORS = (  # each room imports from rooms of lower floors, and from itself
    ("runtime",),
    ("layers",),
    ("ode",),
    ("models",),
    ("blocks",),
    ("optimizers",),
    ("training", "data", "analysis", "tracking"),
    ("checkpoints", "diagnostics"),
    ("planner",),
    ("runs",),
    ("inference", "exchange", "experiments"),
    ("explorer",),
    ("cli",),
    ("examples",),
)
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
MATHEMATICS = ("ode", "layers", "models")
LIBRARIES_OF_EDGES = {"ml_collections", "grain", "sentencepiece", "tensorflow_datasets", "orbax"}
PACKAGE = ROOT / "t5x_diffeq"


def list_imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_each_verb_has_a_file():
    assert {path.stem for path in PACKAGE.glob("*.py")} == {*VERBS, "__init__", "__main__"}
    assert {path.stem for path in (PACKAGE / "cli").glob("*.py")} == {*VERBS, "__init__"}
    assert {path.parent.name for path in PACKAGE.glob("*/*.py")} - {"configs"} == set(FLOOR)


ROOMS = [room for room in FLOOR if room != "examples"]  # which use the package as users do


@pytest.mark.parametrize("room", ROOMS)
def test_imports_go_down(room):
    for path in (PACKAGE / room).rglob("*.py"):
        for name in list_imports(path):
            package, _, rest = name.partition(".")
            other = rest.partition(".")[0]
            if package == "t5x_diffeq" and other != room:
                assert FLOOR[other] < FLOOR[room], (path, name)
            if room in MATHEMATICS:
                assert package not in LIBRARIES_OF_EDGES, (path, name)


def test_the_package_does_not_know_the_studies():
    for path in [*PACKAGE.rglob("*.py"), *(ROOT / "configs").glob("*.py")]:
        assert not [name for name in list_imports(path) if name.startswith("studies.")], path


def test_no_test_imports_another():
    tests = {path.stem for path in (ROOT / "tests").glob("*.py")}
    takes_no_part = {name for name in tests if name.endswith("_test")} | {"conftest"}
    for name in tests:
        found = {other.partition(".")[0] for other in list_imports(ROOT / "tests" / f"{name}.py")}
        assert not found & takes_no_part, name


def test_contributing_maps_the_rooms():
    """Its map has a line for each floor, the highest first."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    lines = re.findall(r"^    ([a-z]+(?:, [a-z]+)*)  +\S", text, re.MULTILINE)
    found = [set(line.split(", ")) for line in lines if set(line.split(", ")) & FLOOR.keys()]
    assert found == [set(rooms) for rooms in reversed(FLOORS)]
