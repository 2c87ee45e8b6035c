"""The files of the images and of the launchers; built_image_test.py builds an image."""

import itertools
import re
import shutil
import sysconfig
import tomllib
from pathlib import Path

import pytest
from helpers import ROOT, run_to_end
from packaging.requirements import Requirement

DOCKERFILES = sorted((ROOT / "docker").glob("*.Dockerfile"))
TOOLS = Path(sysconfig.get_path("scripts"))


def run(*command, **options):
    ended = run_to_end(command, **options)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


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
def test_what_is_copied(dockerfile):
    """It exists, .dockerignore lets it in, and it decides the image's tag; the base is pinned."""
    text, ignored = dockerfile.read_text(), (ROOT / ".dockerignore").read_text()
    copied = " ".join(re.findall(r"^COPY (?!--from)(.*) \S+$", text, re.MULTILINE)).split()
    script = f"ROOT={ROOT}; source {ROOT}/launch/kubernetes.sh; sources"
    sources = run("bash", "-c", script, cwd=ROOT).splitlines()
    for path in copied:
        assert (ROOT / path).exists(), path
        assert f"\n!{path.split('/')[0]}\n" in ignored, path
        decides = any(f"{line}/".startswith(f"{path}/") for line in sources)
        assert decides or path in ("README.md", "LICENSE"), path
    (base,) = re.findall(r"(?m)^ARG BASE=(.*)$", text)
    assert re.fullmatch(r"python:3\.12\.\d+-slim-bookworm@sha256:[0-9a-f]{64}", base)
    assert set(re.findall(r"(?m)^FROM (\S+)", text)) == {"${BASE}"}


def test_constraints_fit_the_dependencies():
    """Each has a version in constraints.txt, with hashes, that pyproject.toml allows."""
    text = (ROOT / "docker" / "constraints.txt").read_text()
    pins = dict(re.findall(r"(?m)^([\w.-]+)==(\S+)(?: ;.*)? \\\n    --hash=sha256:", text))
    assert len(pins) == len(re.findall(r"(?m)^\S", text))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    of_extras = [each for extra in ("tpu", "gpu", "data", "gcs") for each in extras[extra]]
    for requirement in map(Requirement, [*project["dependencies"], *of_extras]):
        name = requirement.name.lower().replace("_", "-")
        assert requirement.specifier.contains(pins[name]), name
    assert {"libtpu", "jax-cuda13-plugin", "uv", "hatchling", "editables"} <= pins.keys()
    clone = (ROOT / "launch" / "versions.txt").read_text().splitlines()
    assert {f"{name}=={pins[name]}" for name in ("hatchling", "editables")} <= {*clone}


@pytest.mark.parametrize("step", ["dependencies", "project"])
def test_an_image_installs_only_what_is_locked(step, tmp_path, stand_ins):
    """Also what builds the project, and what installs all that."""
    stand_ins.add(stand_ins.folder / "bin" / "python")
    for name in ("install.sh", "constraints.txt"):
        shutil.copy(ROOT / "docker" / name, tmp_path)
    (tmp_path / "pyproject.toml").touch()
    run(tmp_path / "install.sh", step, env=stand_ins.environment())
    installing = [call for call in stand_ins.calls() if "install" in call]
    locked = {("--constraint", "constraints.txt"), ("--build-constraint", "constraints.txt")}
    locked.add(("--requirement", "uv.txt"))
    assert installing and all(locked & {*itertools.pairwise(call)} for call in installing)


@pytest.mark.slow
def test_a_build_backend_with_another_hash_is_refused(tmp_path):
    """By uv, which takes the hashes of constraints; pip takes them as requirements."""
    locked = (ROOT / "docker" / "constraints.txt").read_text()
    spoiled = re.sub(
        r"(?s)(\nhatchling==.*?\n)(?=\S)", lambda m: re.sub("256:..", "256:00", m[1]), locked
    )
    (tmp_path / "constraints.txt").write_text(spoiled)
    build = [TOOLS / "uv", "build", "--quiet", "--no-cache", "--wheel", f"--out-dir={tmp_path}"]
    ended = run_to_end([*build, f"--build-constraint={tmp_path}/constraints.txt", ROOT])
    assert ended.returncode and "Hash mismatch for `hatchling==" in ended.stderr, ended.stderr


@pytest.fixture
def enter(stand_ins, tmp_path):
    """The images' entry point, with the files beside it; python is a stand-in."""
    for file in ("docker/verb.sh", "launch/forward.sh"):
        shutil.copy(ROOT / file, tmp_path)
    stand_ins.add(stand_ins.folder / "bin" / "python")

    def run(*words, **variables):
        environment = stand_ins.environment(**variables)
        command = [tmp_path / "verb.sh", *words]
        return run_to_end(command, env=environment)

    return run


def test_entry_point(stand_ins, enter):
    """Runs the verb, and hands back its status."""
    stand_ins.rules({"call": "diffeq train", "status": 42})
    train = ["python", "-m", "t5x_diffeq", "train", "--a=$(b) c"]
    assert enter("train", "--a=$(b) c", JAX_PLATFORMS="cuda,cpu").returncode == 42
    assert enter().returncode == 0
    assert stand_ins.calls() == [train, train[:3]]


def test_jax_takes_most_of_a_gpus_memory(stand_ins, enter):
    python = stand_ins.folder / "bin" / "python"
    python.write_text("#!/usr/bin/env bash\necho ${XLA_CLIENT_MEM_FRACTION:-}\n")
    older = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.6"}  # jaxlib refuses both at once
    for given, taken in ({}, "0.92"), ({"XLA_CLIENT_MEM_FRACTION": "0.5"}, "0.5"), (older, ""):
        assert enter("train", JAX_PLATFORMS="cuda,cpu", **given).stdout.strip() == taken


def test_on_kubernetes_all_lines_go_to_standard_output(stand_ins, enter):
    """Of standard error, Google's logging makes errors ("stderr entries have severity ERROR")."""
    stand_ins.rules({"call": "diffeq train", "error": "step 5\n"})
    assert enter("train", JAX_PLATFORMS="cpu").stdout == ""
    there = {"JAX_PLATFORMS": "cpu", "KUBERNETES_SERVICE_HOST": "10.0.0.1"}
    assert enter("train", **there).stdout == "step 5\n"
