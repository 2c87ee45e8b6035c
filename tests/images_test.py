"""The images' files, and the wheel that they install. There is no Docker in these tests: what the
Dockerfiles run is run in a virtual environment instead.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from importlib.metadata import requires
from pathlib import Path

import pytest
from conftest import ROOT
from packaging.requirements import Requirement
from packaging.version import Version
from stand_ins import stand_ins_fixture  # noqa: F401

DOCKERFILES = sorted((ROOT / "docker").glob("*.Dockerfile"))
TOOLS = Path(sysconfig.get_path("scripts"))


def run(*command, **options):
    ended = subprocess.run(command, capture_output=True, text=True, **options)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def test_scripts_are_clean():
    scripts = [*ROOT.glob("launch/**/*.sh"), *ROOT.glob("docker/*.sh")]
    run(TOOLS / "shellcheck", *scripts, cwd=ROOT)
    for script in scripts:
        sourced = not script.read_text().startswith("#!")
        assert sourced or "\nset -euo pipefail\n" in script.read_text(), script
        assert sourced or script.stat().st_mode & 0o100, script
        assert not re.search(r"(?m)(^|[;&|(])\s*eval\b", script.read_text()), script


def test_manifests_and_dockerfiles_are_clean():
    run(TOOLS / "yamllint", "--strict", "launch/gke", ".yamllint", cwd=ROOT)
    run(TOOLS / "hadolint", *DOCKERFILES, cwd=ROOT)


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.stem)
def test_what_is_copied_exists_and_is_let_in(dockerfile):
    let_in = re.findall(r"^!(.*)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE)
    copied = re.findall(r"^COPY (.*) \S+$", dockerfile.read_text(), re.MULTILINE)
    for path in " ".join(copied).split():
        assert (ROOT / path).exists(), path
        assert path.split("/")[0] in let_in, path


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.stem)
def test_what_is_copied_decides_the_tag(dockerfile):
    script = f"ROOT={ROOT}; source {ROOT}/launch/kubernetes.sh; sources"
    lines = run("bash", "-c", script, cwd=ROOT).splitlines()
    for copied in re.findall(r"^COPY (.*) \S+$", dockerfile.read_text(), re.MULTILINE):
        for path in {*copied.split()} - {"README.md", "LICENSE"}:
            assert any(f"{line}/".startswith(f"{path}/") for line in lines), path


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.stem)
def test_images_run_as_a_user_of_their_own(dockerfile):
    lines = dockerfile.read_text().splitlines()
    assert lines.index("USER 1000") > max(n for n, line in enumerate(lines) if line[:3] == "RUN")
    dependencies = lines.index(f"RUN ./install.sh dependencies {dockerfile.stem}")
    assert dependencies < lines.index("COPY t5x_diffeq t5x_diffeq")  # kept when the sources change


def test_constraints_fit_the_dependencies():
    """Every dependency has a version in constraints.txt, and one that pyproject.toml allows."""
    lines = (ROOT / "docker" / "constraints.txt").read_text().splitlines()
    pins = {}
    for line in lines:
        requirement = Requirement(line)
        assert not requirement.url
        (pin,) = requirement.specifier
        assert pin.operator == "=="
        pins[requirement.name] = Version(pin.version)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [
        *project["dependencies"],
        *(x for e in ("tpu", "gpu", "data", "gcs") for x in extras[e]),
    ]
    for requirement in map(Requirement, wanted):
        name = requirement.name.lower().replace("_", "-")
        assert requirement.specifier.contains(pins[name]), name
    assert {"libtpu", "jax-cuda13-plugin", "uv"} <= pins.keys()


# ---------------------------------------------------------------- installed, without a clone


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """A virtual environment with the wheel in it; the dependencies are this one's."""
    folder = tmp_path_factory.mktemp("wheel")
    run("uv", "build", "--quiet", "--wheel", "--out-dir", folder, ROOT)
    run(sys.executable, "-m", "venv", "--without-pip", folder / "venv")
    site = next((folder / "venv" / "lib").glob("python*/site-packages"))
    (wheel,) = folder.glob("*.whl")
    shutil.unpack_archive(wheel, site, "zip")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    return folder / "venv" / "bin" / "python"


def test_configs_are_found_in_a_wheel(environment, tmp_path):
    """The project's own, and one's own beside it that builds on them."""
    folder = tmp_path / "here"
    (folder / "configs").mkdir(parents=True)
    mine = "from configs import tiny\n\n\ndef get_config():\n    return tiny.get_config()\n"
    (folder / "configs" / "mine.py").write_text(mine)
    clean = {"PATH": os.environ["PATH"], "JAX_PLATFORMS": "cpu"}
    code = (
        "import sys\nfrom t5x_diffeq import command_line, train\n"
        "command_line.parse(sys.argv, train.FLAGS)\n"
        "print(command_line.__file__, train.CONFIG.value.train.total_steps, 'train' in sys.modules)"
    )
    for config in ("configs/tiny.py", "configs/llama1b.py:ode", "configs/mine.py"):
        command = [environment, "-c", code, f"--config={config}", "--config.train.total_steps=7"]
        file, steps, shadowed = run(*command, cwd=folder, env=clean).split()
        assert Path(file).is_relative_to(environment.parents[1])
        assert (steps, shadowed) == ("7", "False")
    command = [environment, "-m", "t5x_diffeq.train", "--config=configs/none.py", "--workdir=w"]
    ended = subprocess.run(command, cwd=folder, env=clean, capture_output=True, text=True)
    assert ended.returncode == 2
    assert "--config=configs/none.py: there is no such file" in ended.stderr


def image(stand_ins, folder):
    """The files beside the entry point, as the Dockerfiles copy them."""
    folder.mkdir()
    for file in ("docker/verb.sh", "launch/forward.sh", "launch/xla_flags.py"):
        assert all(file in dockerfile.read_text() for dockerfile in DOCKERFILES)
        shutil.copy(ROOT / file, folder)
    stand_ins.add(stand_ins.folder / "bin" / "python")
    return folder / "verb.sh"


def test_entry_point(stand_ins, tmp_path):
    """Runs the verb, hands back its status, and asks for XLA's flags on GPU alone."""
    entry = image(stand_ins, tmp_path / "image")
    stand_ins.rules({"call": "diffeq.train", "status": 42})
    environment = stand_ins.environment(JAX_PLATFORMS="tpu,cpu")
    assert subprocess.run([entry, "train", "--a=$(b) c"], env=environment).returncode == 42
    assert stand_ins.calls() == [["python", "-m", "t5x_diffeq.train", "--a=$(b) c"]]
    environment = stand_ins.environment(JAX_PLATFORMS="cuda,cpu")
    assert subprocess.run([entry, "train"], env=environment).returncode == 42
    assert stand_ins.calls()[1][1].endswith("xla_flags.py")
    assert subprocess.run([entry], env=environment).returncode == 0
    assert stand_ins.calls()[-1] == ["python", "-m", "t5x_diffeq"]


@pytest.mark.slow
def test_installation_of_the_tpu_image(tmp_path):
    """docker/tpu.Dockerfile's RUN lines, in a virtual environment of the images' Python."""
    wanted = os.environ.get("PYTHON_OF_IMAGES", "3.12")
    find = ["uv", "python", "find", "--no-python-downloads", "--no-project", wanted]
    found = subprocess.run(find, capture_output=True, text=True)  # passes over shims that only fail
    if found.returncode != 0:
        pytest.skip("no Python 3.12 here: PYTHON_OF_IMAGES names one")
    python = found.stdout.strip()
    venv, opt = tmp_path / "venv", tmp_path / "opt"
    run("uv", "venv", "--quiet", "--seed", "--python", python, venv)
    opt.mkdir()
    for file in (
        "docker/install.sh",
        "docker/constraints.txt",
        "pyproject.toml",
        "README.md",
        "LICENSE",
    ):
        shutil.copy(ROOT / file, opt)
    # The settings of pip and uv are this machine's.
    clean = {**os.environ, "PATH": f"{venv / 'bin'}:{os.environ['PATH']}", "JAX_PLATFORMS": "cpu"}
    run("bash", opt / "install.sh", "dependencies", "tpu", env=clean)
    for folder in ("configs", "t5x_diffeq"):
        shutil.copytree(ROOT / folder, opt / folder)
    assert "t5x_diffeq 0." in run("bash", opt / "install.sh", "project", env=clean)
    frozen = run("uv", "pip", "freeze", "--python", venv / "bin" / "python", env=clean)
    pins = (ROOT / "docker" / "constraints.txt").read_text().splitlines()
    others = [line for line in frozen.splitlines() if "==" in line and line not in pins]
    assert [
        line.split("==")[0] for line in others if "pip" not in line and "setup" not in line
    ] == []
    assert requires("t5x_diffeq")
