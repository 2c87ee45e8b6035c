"""The images' files, and the wheel that they install. What the Dockerfiles run is run in a virtual
environment here; tests/built_image_test.py builds one.
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
from helpers import ROOT
from images import python_of_images
from packaging.requirements import Requirement
from packaging.version import Version

DOCKERFILES = sorted((ROOT / "docker").glob("*.Dockerfile"))
TOOLS = Path(sysconfig.get_path("scripts"))
UV = (sys.executable, "-m", "uv")


def run(*command, **options):
    ended = subprocess.run(command, capture_output=True, text=True, **options)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def copied_files(dockerfile):
    """What a Dockerfile copies from the project."""
    copied = re.findall(r"^COPY (?!--from)(.*) \S+$", dockerfile.read_text(), re.MULTILINE)
    return " ".join(copied).split()


@pytest.mark.slow
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
    for path in copied_files(dockerfile):
        assert (ROOT / path).exists(), path
        assert path.split("/")[0] in let_in, path


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.stem)
def test_what_is_copied_decides_the_tag(dockerfile):
    script = f"ROOT={ROOT}; source {ROOT}/launch/kubernetes.sh; sources"
    lines = run("bash", "-c", script, cwd=ROOT).splitlines()
    for path in {*copied_files(dockerfile)} - {"README.md", "LICENSE"}:
        assert any(f"{line}/".startswith(f"{path}/") for line in lines), path


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.stem)
def test_the_base_is_pinned(dockerfile):
    (base,) = re.findall(r"(?m)^ARG BASE=(.*)$", dockerfile.read_text())
    assert re.fullmatch(r"python:3\.12\.\d+-slim-bookworm@sha256:[0-9a-f]{64}", base)
    assert set(re.findall(r"(?m)^FROM (\S+)", dockerfile.read_text())) == {"${BASE}"}


def test_requirements_are_the_projects(tmp_path):
    """Without what pyproject.toml says of linting; the same bytes for the same dependencies."""
    shutil.copy(ROOT / "docker" / "install.sh", tmp_path)
    text = (ROOT / "pyproject.toml").read_text()
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    made = []
    for settings in (text, text.replace("line-length = 100", "line-length = 99")):
        (tmp_path / "pyproject.toml").write_text(settings)
        command = ["bash", tmp_path / "install.sh", "requirements", "tpu"]
        made.append(run(*command, env={**os.environ, "PATH": path}))
    assert made[0] == made[1]
    names = {Requirement(line).name for line in made[0].splitlines()}
    assert {"jax", "flax", "gcsfs", "tokenizers", "diffrax"} <= names
    assert "jax[tpu]" in made[0].split()
    assert not names & {"ruff", "pytest"}


def test_constraints_fit_the_dependencies():
    """Every dependency has a version in constraints.txt, and one that pyproject.toml allows."""
    lines = (ROOT / "docker" / "constraints.txt").read_text().splitlines()
    pins = {}
    for line in lines:
        if line.startswith("    --hash=sha256:"):
            continue
        requirement = Requirement(line.removesuffix(" \\"))
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
    hashed = {line.split("==")[0] for line in lines if line.endswith(" \\") and "==" in line}
    assert hashed == pins.keys()


@pytest.mark.slow
def test_a_file_with_another_hash_is_refused(tmp_path):
    """uv and pip check the hashes of constraints."""
    python = tmp_path / "venv" / "bin" / "python"
    run(sys.executable, "-m", "venv", tmp_path / "venv")
    (tmp_path / "constraints.txt").write_text(f"six==1.17.0 --hash=sha256:{'0' * 64}\n")
    for command in ([*UV, "pip", "install", "--python", python], [python, "-m", "pip", "install"]):
        words = [*command, "--no-cache-dir", "--constraint", tmp_path / "constraints.txt", "six"]
        ended = subprocess.run(words, capture_output=True, text=True)
        assert ended.returncode != 0
        assert "hash" in ended.stderr.lower()


# ---------------------------------------------------------------- installed, without a clone


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """A virtual environment with the wheel in it; the dependencies are this one's."""
    folder = tmp_path_factory.mktemp("wheel")
    run(*UV, "build", "--quiet", "--wheel", "--out-dir", folder, ROOT)
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
        "import sys\nfrom t5x_diffeq.cli import train\n"
        "from t5x_diffeq.runtime import command_line\n"
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
    """Runs the verb, hands back its status, and asks for the accelerator's flags."""
    entry = image(stand_ins, tmp_path / "image")
    stand_ins.rules({"call": "diffeq train", "status": 42}, {"call": "xla_flags", "out": "--x=1"})
    environment = stand_ins.environment(JAX_PLATFORMS="cpu")
    assert subprocess.run([entry, "train", "--a=$(b) c"], env=environment).returncode == 42
    assert stand_ins.calls() == [["python", "-m", "t5x_diffeq", "train", "--a=$(b) c"]]
    for platforms, words in (("cuda,cpu", ["gpu"]), ("tpu,cpu", ["tpu", "v5p"])):
        environment = stand_ins.environment(JAX_PLATFORMS=platforms, T5X_DIFFEQ_TPU="v5p")
        assert subprocess.run([entry, "train"], env=environment).returncode == 42
        flags, train = stand_ins.calls()[-2:]
        assert flags[1].endswith("xla_flags.py")
        assert flags[2:] == words
        assert train == ["python", "-m", "t5x_diffeq", "train"]
    assert subprocess.run([entry], env=environment).returncode == 0
    assert stand_ins.calls()[-1] == ["python", "-m", "t5x_diffeq"]


def test_jax_takes_most_of_a_gpus_memory(stand_ins, tmp_path):
    """On SLURM and GKE alike: the image's entry point sees to it."""
    entry = image(stand_ins, tmp_path / "image")
    python = stand_ins.folder / "bin" / "python"
    python.write_text("#!/usr/bin/env bash\necho ${XLA_CLIENT_MEM_FRACTION:-}\n")
    older = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.6"}  # jaxlib refuses both at once
    cases = ({}, "0.92"), ({"XLA_CLIENT_MEM_FRACTION": "0.5"}, "0.5"), (older, "")
    for given, taken in cases:
        environment = stand_ins.environment(JAX_PLATFORMS="cuda,cpu", **given)
        ended = subprocess.run([entry, "train"], env=environment, capture_output=True, text=True)
        assert ended.stdout.strip() == taken


def test_on_kubernetes_all_lines_go_to_standard_output(stand_ins, tmp_path):
    """Of standard error, Google's logging makes errors ("stderr entries have severity ERROR")."""
    entry = image(stand_ins, tmp_path / "image")
    stand_ins.rules({"call": "diffeq train", "error": "step 5\n", "out": "{}\n"})
    for there in ({}, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}):
        environment = stand_ins.environment(JAX_PLATFORMS="cpu", **there)
        ended = subprocess.run([entry, "train"], env=environment, capture_output=True, text=True)
        assert "{}" in ended.stdout
        assert ("step 5" in ended.stdout) == bool(there)


@pytest.mark.slow
def test_installation_of_the_tpu_image(tmp_path):
    """docker/tpu.Dockerfile's RUN lines, in a virtual environment of the images' Python."""
    python = python_of_images()
    if python is None:
        pytest.skip("no Python 3.12 here: PYTHON_OF_IMAGES names one")
    venv, opt = tmp_path / "venv", tmp_path / "opt"
    run(*UV, "venv", "--quiet", "--seed", "--python", python, venv)
    opt.mkdir()
    for file in ("docker/install.sh", "docker/constraints.txt", "pyproject.toml"):
        shutil.copy(ROOT / file, opt)
    # The settings of pip and uv are this machine's.
    clean = {**os.environ, "PATH": f"{venv / 'bin'}:{os.environ['PATH']}", "JAX_PLATFORMS": "cpu"}
    wanted = run("bash", opt / "install.sh", "requirements", "tpu", env=clean)
    (opt / "requirements.txt").write_text(wanted)
    run("bash", opt / "install.sh", "dependencies", env=clean)
    for file in ("README.md", "LICENSE"):
        shutil.copy(ROOT / file, opt)
    for folder in ("configs", "t5x_diffeq"):
        shutil.copytree(ROOT / folder, opt / folder)
    assert "t5x_diffeq 0." in run("bash", opt / "install.sh", "project", env=clean)
    frozen = run(*UV, "pip", "freeze", "--python", venv / "bin" / "python", env=clean)
    pins = (ROOT / "docker" / "constraints.txt").read_text().replace(" \\", "").splitlines()
    others = [line for line in frozen.splitlines() if "==" in line and line not in pins]
    assert [
        line.split("==")[0] for line in others if "pip" not in line and "setup" not in line
    ] == []
    assert requires("t5x_diffeq")
