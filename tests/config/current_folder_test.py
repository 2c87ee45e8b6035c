"""The folder where one stands, which may be somebody else's: what of it is imported, and when."""

import importlib
import os
import shutil
import sys
import sysconfig
from pathlib import Path

import pytest
from helpers import ROOT, run_to_end
from stand_ins import add_python, mark_installed

from t5x_diffeq import cli
from t5x_diffeq.config import plugins
from t5x_diffeq.config.config_files import CONFIGS, load_config, project_config, values_of
from t5x_diffeq.system.errors import InputError

LEAVES_A_MARK = "open(__file__ + '.ran', 'w').close()\n"
MODULES = ("absl", "optax", "jax", "pickle", "torch", "tensorflow")  # some are installed


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with modules of these names, in which we stand."""
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each not in ("", os.getcwd())])
    monkeypatch.chdir(tmp_path)
    for name in MODULES:
        (tmp_path / f"{name}.py").write_text(LEAVES_A_MARK)
    (tmp_path / "my_module.py").write_text("import optax\nKIND = 'mine'\n")
    yield tmp_path
    sys.modules.pop("my_module", None)
    plugins.load_plugin.cache_clear()
    plugins._identify.cache_clear()


def ran(folder):
    return sorted(path.name for path in folder.rglob("*.ran"))


@pytest.mark.slow
def test_the_command_imports_nothing_of_the_folder(here, finished):
    shutil.copytree(finished[1], here, dirs_exist_ok=True)
    command = Path(sysconfig.get_path("scripts"), "t5x_diffeq")
    ended = run_to_end([command, "status", "--workdir=."], cwd=here)
    assert ended.returncode == 0 and "done at step 6 of 6" in ended.stdout, ended.stderr
    assert ran(here) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "arguments", "said"),
    [
        ("local.sh", ["configs/tiny.py", "--workdir=run", "--dry-run"], "t5x_diffeq.train"),
        ("reproduce/spectra.sh", ["--text=stdlib", "--dry_run"], "t5x_diffeq.train"),
    ],
)
def test_a_launcher_imports_nothing_of_the_folder(here, script, arguments, said, tmp_path_factory):
    venv = tmp_path_factory.mktemp("venv")  # not the tests' own, into which it would install
    add_python(venv)
    mark_installed(venv, ("analysis",))
    given = {**os.environ, "VENV": str(venv)}
    ended = run_to_end([ROOT / "launch" / script, *arguments], cwd=here, env=given)
    assert ended.returncode == 0 and said in ended.stdout, ended.stderr
    assert ran(here) == []


def test_setting_up_imports_nothing_of_the_folder(here):
    """Python's own `venv` and `pip` neither."""
    (here / "venv.py").write_text(LEAVES_A_MARK)
    script = f"source {ROOT}/launch/setup.sh; {sys.executable} -m venv --help >/dev/null"
    run_to_end(["bash", "-euc", script], cwd=here, check=True)
    assert ran(here) == []


def test_a_plugin_in_the_folder_is_last_on_the_path(here):
    assert plugins.load_plugin("model.block", "my_module:KIND") == "mine"
    assert sys.path[-1] == str(here) and sys.path.count(str(here)) == 1
    assert importlib.import_module("my_module").optax is importlib.import_module("optax")
    assert ran(here) == []


def test_an_installed_plugin_leaves_the_folder_off_the_path(here):
    before = [*sys.path]
    assert plugins.load_plugin("optimizer.name", "optax:adam")
    with pytest.raises(InputError, match="optax has no nothing"):
        plugins.load_plugin("optimizer.name", "optax:nothing")
    assert sys.path == before


def test_what_a_run_recorded_of_a_plugin_here_is_found_but_not_imported(here):
    before = [*sys.path]
    recorded = plugins.plugin_versions({"model.block": "my_module:KIND"})["my_module"]
    assert recorded.startswith("sha256 ")
    assert sys.path == before and "my_module" not in sys.modules


def test_a_config_file_of_ones_own_may_import_what_is_beside_it(here):
    text = (CONFIGS / "tiny.py").read_text()
    (here / "mine.py").write_text(f"import my_module\n{text}")
    assert load_config("mine.py").data.source == "stdlib"
    assert sys.path[-1] == str(here) and ran(here) == []


def test_only_a_person_who_names_a_config_here_gets_it(here):
    """The configs that a verb takes by itself are the project's."""
    (here / "configs").mkdir()
    (here / "configs" / "tiny.py").write_text(LEAVES_A_MARK)
    assert values_of("tiny.py", "ode")["data.source"] == "stdlib"
    assert project_config("tiny.py") == str(CONFIGS / "tiny.py")
    assert project_config("base.py") == "configs/base.py"
    assert ran(here) == []
    with pytest.raises(InputError, match=r"has no function get_config"):
        load_config("configs/tiny.py")


def test_started_processes_leave_the_folder_off_their_path(here, monkeypatch):
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    code = [sys.executable, "-c", "import json, pickle, sys; print(sys.path[0])"]
    monkeypatch.setattr(sys, "path", [str(here), *sys.path])  # as `python -m` has it
    cli._keep_children_from_current_folder()
    assert "PYTHONSAFEPATH" not in os.environ
    monkeypatch.setattr(sys, "path", sys.path[1:])
    monkeypatch.setenv("PYTHONSAFEPATH", "")
    cli._keep_children_from_current_folder()
    assert os.environ["PYTHONSAFEPATH"] == "1"
    assert run_to_end(code, cwd=here, check=True).stdout.strip() not in ("", str(here))
    assert ran(here) == []
