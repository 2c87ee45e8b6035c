"""The rooms of the package: a file for each verb, imports that go down only."""

import ast
import os
import re

import pytest
from helpers import ROOT

from t5x_diffeq.cli import VERBS

ROOMS = (  # from the highest: each imports from lower rooms, and from itself
    *("cli", "experiments", "inference", "hf", "planner", "training", "analysis", "checkpoints"),
    *("data", "model", "cluster", "config", "system"),
)
FLOOR = {room: -floor for floor, room in enumerate(ROOMS)}
WITHIN = {  # the same for the folders of a room, and for a file above them; "" are its other files
    "model": ("", "ode", "layers"),
    "training": ("loop", "hooks", "", "tracking", "optimizers"),
    "inference": ("explorer", ""),
    "config": ("", "keys"),
}
# The files of cli that are not verbs.
COMMON = ("__init__", "command_line", "failures", "flag_values", "quiet_libraries", "verb_flags")
LIBRARIES_OF_EDGES = {"ml_collections", "grain", "sentencepiece", "tensorflow_datasets", "orbax"}
PACKAGE, TESTS = ROOT / "t5x_diffeq", ROOT / "tests"


def list_imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_each_verb_has_a_file():
    assert {path.stem for path in PACKAGE.glob("*.py")} == {*VERBS, "__init__", "__main__"}
    assert {path.stem for path in (PACKAGE / "cli").glob("*.py")} == {*VERBS, *COMMON}
    assert {path.parent.name for path in PACKAGE.glob("*/*.py")} - {"configs"} == set(ROOMS)


@pytest.mark.parametrize("room", ROOMS)
def test_imports_go_down(room):
    for path in (PACKAGE / room).rglob("*.py"):
        for name in list_imports(path):
            package, _, rest = name.partition(".")
            other = rest.partition(".")[0]
            if package == "t5x_diffeq" and other != room:
                assert FLOOR[other] < FLOOR[room], (path, name)
            if room == "model":
                assert package not in LIBRARIES_OF_EDGES, (path, name)


@pytest.mark.parametrize("room", WITHIN)
def test_imports_within_a_room_go_down(room):
    folders = WITHIN[room]
    floors = {folder: -floor for floor, folder in enumerate(folders)}
    for path in (PACKAGE / room).rglob("*.py"):
        own = path.relative_to(PACKAGE / room).with_suffix("").parts[0]
        own = own if own in folders else ""
        for name in list_imports(path):
            if name.startswith(f"t5x_diffeq.{room}."):
                other = name.split(".")[2]
                other = other if other in folders else ""
                assert floors[other] <= floors[own], (path, name)


def test_what_is_imported_exists():
    """Also within functions, where a verb's file imports what is heavy."""
    folders = ("t5x_diffeq", "tests", "studies", "examples", "launch", "configs")
    for path in (path for folder in folders for path in (ROOT / folder).rglob("*.py")):
        for name in list_imports(path):
            package, *parts = name.split(".")
            if package == "t5x_diffeq" and len(parts) > 1:
                module = PACKAGE.joinpath(*parts)
                there = [f"{module}.py", f"{module.parent}.py", f"{module}/__init__.py"]
                text = (module.parent / "__init__.py") if module.parent.is_dir() else None
                found = any(map(os.path.exists, there)) or (text and parts[-1] in text.read_text())
                assert found, (path, name)


def public_names(path):
    """The classes and functions of a module, and its names for types."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = (each.id for each in targets if isinstance(each, ast.Name))
            yield from (name for name in names if not name.isupper())


def test_a_public_name_means_one_thing():
    """`main` and `train` are those of a verb; an exported model has a file of its own."""
    homes = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        if not path.stem.startswith("modeling_"):
            for name in {*public_names(path)} - {"main", "train"}:
                assert name.startswith("_") or homes.setdefault(name, path) == path, name


def test_the_package_does_not_know_the_studies():
    for path in [*PACKAGE.rglob("*.py"), *(ROOT / "configs").glob("*.py")]:
        assert not [name for name in list_imports(path) if name.startswith("studies.")], path


def test_tests_have_the_rooms_of_what_they_test():
    rooms = {*ROOMS, "docs", "example_models", "launch"}
    assert {path.parent.name for path in TESTS.glob("*/*_test.py")} == rooms
    assert {path.parent.name for path in TESTS.glob("*/*.py")} == {*rooms, "support"}


def test_no_test_imports_another():
    tests = {path.stem for path in TESTS.rglob("*_test.py")} | {"conftest"}
    for path in TESTS.rglob("*.py"):
        assert not {name.partition(".")[0] for name in list_imports(path)} & tests, path


def test_contributing_maps_the_rooms():
    """Its map has a line for each, the highest first."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    lines = re.findall(r"^    ([a-z]+)  +\S", text, re.MULTILINE)
    assert tuple(line for line in lines if line in FLOOR) == ROOMS
