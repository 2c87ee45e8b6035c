"""Runs the scripts of launch/ with stand-ins for the programs that they call."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from helpers import ROOT, SUPPORT
from patience import patience
from process_runs import HEAR_CTRL_C

from t5x_diffeq.planner.topology import LIBTPU_ENVIRONMENT

PROGRAMS = ("gcloud", "docker", "sbatch", "srun", "ssh")
ODD = "--config.data.path=$(touch pwned) `touch pwned` \"two\"  'one' \\ é * ; ~ $HOME\nnew"


def slow_training(python: str) -> str:
    """Lines for `add_python`: trainings are those of `slow_train.py`, run by this Python.

    How many CPUs a process has, stands in a file then.
    """
    return (
        'if [ "${2:-}" = t5x_diffeq ]; then set -- "$1" "$2.$3" "${@:4}"; fi\n'
        'if [ "${2:-}" = t5x_diffeq.train ]; then\n'
        '  cpus="$(env -u OMP_NUM_THREADS nproc)"\n'
        '  printf %s "$cpus" >"$TRAIN_CONTROL/cpus-${SLURM_PROCID:-0}"\n'
        f'  shift 2\n  exec {python} {ROOT}/tests/support/slow_train.py "$@"\nfi\n'
    )


def clean_environment() -> dict[str, str]:
    """The environment without what these tests set for themselves: devices, and libtpu's host."""
    own = {"XLA_FLAGS", "JAX_PLATFORMS", *LIBTPU_ENVIRONMENT}
    return {name: value for name, value in os.environ.items() if name not in own}


def add_python(venv: Path, before: str = "") -> None:
    """Gives an environment the Python of these tests, which runs lines of shell before."""
    (venv / "bin").mkdir(parents=True, exist_ok=True)
    python = venv / "bin" / "python"
    python.write_text(f'#!/usr/bin/env bash\n{before}exec {sys.executable} "$@"\n')
    python.chmod(0o755)


def mark_installed(venv: Path, extras: tuple[str, ...], project: Path = ROOT) -> None:
    """Makes `setup` take an environment as made for each of these extras of the project."""
    decisive = (ROOT / "pyproject.toml", ROOT / "launch" / "versions.txt")
    text = "".join(path.read_text() for path in decisive if path.exists()).rstrip("\n")
    for each in extras:
        (venv / f".installed-{each}").write_text(f"{text}|{project}")


class StandIns:
    """A folder of stand-ins, what they answer, and what they were called with."""

    def __init__(self, folder: Path):
        self.folder = folder
        (folder / "bin").mkdir()
        for program in PROGRAMS:
            self.add(folder / "bin" / program)
        self.rules()

    def add(self, path: Path) -> None:
        """A stand-in under this name."""
        path.parent.mkdir(parents=True, exist_ok=True)
        source = (SUPPORT / "stand_in.py").read_text()
        path.write_text(f"#!{sys.executable} -SE\n{source}")
        path.chmod(0o755)

    def rules(self, *rules: dict) -> None:
        """What they answer from now on."""
        (self.folder / "rules.json").write_text(json.dumps(rules))

    def environment(self, **more: str) -> dict[str, str]:
        """For the scripts: stand-ins first, an installed environment, no waiting."""
        return {
            **clean_environment(),
            "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}",
            "STAND_INS": str(self.folder),
            "LAUNCH_POLL_SECONDS": "0",
            "VENV": str(self.install()),
            **more,
        }

    def install(self) -> Path:
        """An environment that `setup` takes as made, with a stand-in as its Python."""
        venv = self.folder / "venv"
        if not venv.exists():
            self.add(venv / "bin" / "python")
            mark_installed(venv, ("gpu,data,gcs,trackers",))
        return venv

    def run(self, script: str, *arguments: str, **more: str) -> subprocess.CompletedProcess:
        """A script of launch/, to its end."""
        return subprocess.run(
            [ROOT / "launch" / script, *arguments],
            env=self.environment(**more),
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=patience(120),
        )

    def interrupt(self, script: str, *arguments: str, said: str, **more: str) -> tuple[int, str]:
        """Ctrl-C for a script, once it said this line; its status, and its errors."""
        process = subprocess.Popen(
            [*HEAR_CTRL_C, ROOT / "launch" / script, *arguments],
            env=self.environment(**more),
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            assert said in iter(process.stdout.readline, "")
            os.killpg(process.pid, signal.SIGINT)
            _, errors = process.communicate(timeout=patience(30))
        finally:
            process.kill()
        return process.returncode, errors

    def calls(self, program: str = "") -> list[list[str]]:
        """Those to a program, or all, in order."""
        path = self.folder / "calls.jsonl"
        lines = map(json.loads, path.read_text().splitlines()) if path.exists() else []
        return [call for call in lines if call[0].startswith(program)]


def assert_one_error(ended: subprocess.CompletedProcess, status: int, message: str) -> None:
    """It ended so, and its last line says why."""
    assert ended.returncode == status, ended.stderr
    *others, last = ended.stderr.rstrip().splitlines()
    assert last.startswith("error: "), ended.stderr
    assert message in last
    assert not any(line.startswith("error: ") for line in others), ended.stderr
