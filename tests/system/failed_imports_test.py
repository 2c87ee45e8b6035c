"""What is said where something hides a module, or where packages are missing or too old."""

import os
import sys
from importlib import metadata

import pytest
from helpers import ROOT, run_to_end

from t5x_diffeq.system import extras
from t5x_diffeq.system.failed_imports import explain_import

VERB = ["-m", "t5x_diffeq.status", "--help"]
SCRIPT = ["-c", "import t5x_diffeq as td"]
LOADS = ["-c", "import t5x_diffeq as td; td.load"]


@pytest.mark.parametrize(
    ("name", "arguments", "status"),
    [
        ("random", VERB, 2),
        ("logging", VERB, 2),
        *[("math", VERB, 2)] * ("math" not in sys.builtin_module_names),  # else nothing hides it
        ("types", SCRIPT, 1),
        ("numpy/__init__", LOADS, 1),
    ],
)
def test_a_file_that_hides_a_module_is_named(name, arguments, status, tmp_path):
    file = tmp_path / f"{name}.py"
    file.parent.mkdir(exist_ok=True)
    file.write_text("x = 1")
    given = {**os.environ, "PYTHONPATH": str(ROOT)}
    given.pop("PYTHONSAFEPATH", None)  # which verbs set for the processes that they start
    ended = run_to_end([sys.executable, *arguments], cwd=tmp_path, env=given)
    assert ended.returncode == status
    said = f"{file} hides the module {name.partition('/')[0]}; rename it, or work in another folder"
    assert ended.stderr.splitlines()[-1].partition(": ")[2] == said
    assert arguments is not VERB or ended.stderr.count("\n") == 1


def test_a_python_without_the_packages_is_told():
    command = [sys.executable, "-S", "-m", "t5x_diffeq.train", "--help"]
    ended = run_to_end(command, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert (ended.returncode, ended.stdout, ended.stderr.count("\n")) == (2, "", 1)
    told = f"error: this Python, {sys.executable}, lacks absl; "
    assert ended.stderr.startswith(told) and f"pip install -e {ROOT}\n" in ended.stderr


def test_packages_that_are_missing_or_too_old(monkeypatch):
    """They are named with what is needed, whatever the error of the library that needs them."""
    assert extras.find_lacking() == [] and explain_import(ImportError("of another kind")) is None

    def version(name: str) -> str:
        if name == "sentencepiece":
            raise metadata.PackageNotFoundError(name)
        return "1.26.4" if name == "numpy" else "9999.0"

    monkeypatch.setattr(metadata, "version", version)
    said = explain_import(ImportError("numpy.core.multiarray failed to import"))
    assert "lacks numpy>=2.0 (it has 1.26.4), sentencepiece>=0.2.1; " in said


def test_a_package_that_another_one_needs(monkeypatch):
    """JAX raises an error without a name for jaxlib."""
    error = ModuleNotFoundError("jax requires jaxlib to be installed")
    error.__cause__ = ModuleNotFoundError("No module named 'jaxlib'", name="jaxlib")
    assert f"this Python, {sys.executable}, lacks jaxlib; " in explain_import(error)
    error = ModuleNotFoundError("No module named 'pyarrow'", name="pyarrow.parquet")
    assert "lacks pyarrow; " in explain_import(error) and "[data]" in explain_import(error)
