"""launch/setup.sh: which environment it installs into, and which it leaves as it is."""

import os
import re
import subprocess
from pathlib import Path

import pytest
from helpers import run_to_end
from stand_ins import add_python, clean_environment

ROOT = Path(__file__).parents[2]
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


def test_a_file_is_no_environment(tmp_path):
    (tmp_path / "file").touch()
    given = {**clean_environment(), "VENV": str(tmp_path / "file")}
    ended = run_to_end(["bash", "-euc", f"{SCRIPT} data"], env=given)
    assert ended.returncode == 2
    assert f"error: VENV={tmp_path}/file must be a folder, new or with" in ended.stderr


def test_a_dry_run_installs_nothing(tmp_path):
    add_python(tmp_path, "exit 0\n")
    (tmp_path / ".installed-begun").touch()
    given = {**clean_environment(), "VENV": str(tmp_path)}
    command = [ROOT / "launch" / "tpu_pod.sh", "configs/tiny.py", "--type=v5p-8", "--zone=z"]
    ended = run_to_end([*command, "--workdir=gs://bucket/folder", "--dry-run"], env=given)
    assert "installing" not in ended.stderr and not (tmp_path / ".setup-lock").exists()
    assert "+ gcloud" in ended.stdout


@pytest.mark.parametrize("flag", ["--workdir", "--config.data.path"])
def test_local_sh_installs_what_a_bucket_needs(tmp_path, flag):
    add_python(tmp_path, "exit 0\n")
    (tmp_path / ".installed-begun").touch()
    (tmp_path / "uv").write_text("#!/usr/bin/env bash\necho $*\n")
    (tmp_path / "uv").chmod(0o755)
    given = {**clean_environment(), "VENV": tmp_path, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = [ROOT / "launch" / "local.sh", "configs/tiny.py", f"{flag}=gs://bucket/folder"]
    ended = run_to_end(command, env=given, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert f"--editable {ROOT}[analysis,explore,export,gcs]\n" in ended.stdout


def test_of_two_at_once_one_installs(tmp_path):
    """The other waits for it, and then finds everything there."""
    add_python(tmp_path, WITHOUT_PROJECT)
    slow = SCRIPT.replace('"install $1"', '"install $1"; sleep 1')
    given = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": ROOT}
    environment = {**clean_environment(), "VENV": str(tmp_path)}
    both = [
        subprocess.Popen(["bash", "-euc", f"{slow} data"], env=environment, **given) for _ in "ab"
    ]
    said = [each.communicate() for each in both]
    assert sorted(out for out, _ in said) == ["", f"install {ROOT}[data]\n"]
    assert "another command is installing; waiting for it ..." in said[0][1] + said[1][1]
    assert [each.returncode for each in both] == [0, 0]
    assert not (tmp_path / ".lock").exists()  # which uv would wait for


def test_a_clone_has_the_line_ends_of_linux(tmp_path):
    (tmp_path / ".gitattributes").write_bytes((ROOT / ".gitattributes").read_bytes())
    (tmp_path / "local.sh").write_bytes(b"set -e\n")
    for command in ("init -q", "config core.autocrlf true", "add .", "checkout-index -fa"):
        run_to_end(["git", "-C", tmp_path, *command.split()], check=True)
    assert (tmp_path / "local.sh").read_bytes() == b"set -e\n"


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
