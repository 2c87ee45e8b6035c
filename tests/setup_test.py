"""launch/setup.sh: which environment it installs into, and which it leaves as it is."""

import re
from pathlib import Path

import pytest
from helpers import run_to_end
from stand_ins import add_python, clean_environment

ROOT = Path(__file__).parents[1]
# In place of an installation, which needs minutes.
SCRIPT = 'source launch/setup.sh; install() { echo "install $1"; }; setup '
WITHOUT_PROJECT = '[[ "$*" != *"import t5x_diffeq"* ]] || exit 1\n'


def set_up(venv: Path, extras: str = "gpu data") -> str:
    """What `setup` writes for an environment that VENV names."""
    return run_to_end(
        ["bash", "-euc", SCRIPT + extras],
        env={**clean_environment(), "VENV": str(venv)},
        check=True,
    ).stdout


def test_an_environment_of_ones_own_is_left_as_it_is(tmp_path):
    add_python(tmp_path)
    assert not set_up(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["bin"]


@pytest.mark.parametrize("before", ["", WITHOUT_PROJECT], ids=["begun by setup", "without it"])
def test_another_is_installed_into_once(before, tmp_path):
    add_python(tmp_path, before)
    if not before:
        (tmp_path / ".installed-begun").touch()
    assert set_up(tmp_path) == f"install {ROOT}[gpu,data]\n"
    assert not set_up(tmp_path)
    assert not set_up(tmp_path, "data")
    assert set_up(tmp_path, "data docs") == f"install {ROOT}[data,docs]\n"


def test_what_installs_and_what_builds_have_the_locked_versions(tmp_path):
    """uv and its hashes; and of an editable installation, the build backend."""
    add_python(tmp_path, 'cat "${@: -1}"\nexit 1\n')  # of `pip install --requirement FILE`
    environment = {**clean_environment(), "VENV": str(tmp_path), "PATH": "/usr/bin:/bin"}
    uv = tmp_path / "bin" / "uv"
    uv.write_text("#!/usr/bin/env bash\necho uv $* by $UV_BUILD_CONSTRAINT\n")
    uv.chmod(0o755)
    said = run_to_end(["bash", "-c", "source launch/setup.sh; install ."], env=environment).stdout
    pinned, *hashes = re.findall(r"uv==[\d.]+|--hash=sha256:[0-9a-f]{64}", said)
    assert pinned in (ROOT / "launch" / "versions.txt").read_text() and len(hashes) > 1
    environment["PATH"] = f"{tmp_path / 'bin'}:/usr/bin:/bin"
    said = run_to_end(["bash", "-c", "source launch/setup.sh; install ."], env=environment).stdout
    versions = ROOT / "launch" / "versions.txt"
    assert said == f"uv pip install --constraint {versions} --quiet --editable . by {versions}\n"
