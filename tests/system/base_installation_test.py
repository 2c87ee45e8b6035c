"""What works where only the base dependencies are installed, with and without a clone."""

import os
import re
import shutil
import subprocess
import sys
import textwrap
import tomllib
import zipfile

import pytest
from compilation import QUICK
from environments import make_environment
from helpers import ROOT, numbered_lines, run_to_end
from packaging.requirements import Requirement

from t5x_diffeq.system.extras import EXTRAS

SMALL = [
    f"--config.{key}={value}"
    for key, value in {
        "train.total_steps": 4,
        "train.batch_size": 8,
        "train.eval_batch_size": 8,
        "train.eval_batches": 2,
        "train.checkpoint_every": 2,
        "model.num_steps": 2,
        "model.embed_dim": 16,
        "model.mlp_dim": 32,
        "data.source": "text_files",
        "data.path": "text.txt",
        "data.tokenizer": "bytes",
        "data.sequence_length": 16,
    }.items()
]
CONFIG = "--config=configs/tiny.py"
OF_STREAM = ("--config.data.source=stream", "--config.data.path=owner/corpus")
CHAT = ["generate", "--workdir=run", "--chat", "--prompt=a"]
WITHOUT_EXTRA = {  # a command that needs each extra; `run` is the workdir of a run
    "adaptive": ["evaluate", "--workdir=run", "--scheme=tsit5"],
    "analysis": ["analyze", "spectra", "--workdir=run", "--output=spectra"],
    "data": ["train", CONFIG, "--workdir=other", *OF_STREAM],
    "eval": ["evaluate", "--workdir=run", "--tasks=arc_easy"],
    "explore": ["explore", "--workdir=run"],
    "export": ["export", "--workdir=run", "--output=exported"],
    "gcs": ["evaluate", "--workdir=gs://bucket/run"],
    "gpu_compiler": ["plan", CONFIG, "--topology=h100:8"],
    "tpu": ["plan", CONFIG, "--topology=v5p:2x2x1"],
    "trackers": ["train", CONFIG, "--workdir=other", '--config.train.trackers=("wandb",)'],
}


def test_extras_have_their_packages():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for package, extra in EXTRAS.items():
        wanted = {Requirement(line).name for line in project["optional-dependencies"][extra]}
        assert package in {name.replace("-", "_") for name in wanted}, package
    for path in (ROOT / "t5x_diffeq").rglob("*.py"):
        named = re.findall(r"install_command\([\"'](\w+)", path.read_text())
        assert {*named} <= project["optional-dependencies"].keys(), path


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dist")
    uv = [sys.executable, "-m", "uv"]
    subprocess.run([*uv, "build", "--quiet", "--out-dir", folder, ROOT], check=True)
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    twine = [*uv, "tool", "run", "--quiet", "--python", sys.executable, "twine"]
    subprocess.run([*twine, "check", "--strict", wheel, sdist], check=True)
    return wheel


@pytest.mark.slow
def test_the_base_installation_runs_the_commands_of_the_readme(wheel, tmp_path):
    """The second start reads all programs; what needs an extra names it, and works with it."""
    venv, home = tmp_path / "environment", tmp_path / "home"
    assert "t5x_diffeq/py.typed" in zipfile.ZipFile(wheel).namelist()
    python = make_environment(venv, str(wheel))
    home.mkdir()
    (tmp_path / "text.txt").write_text(numbered_lines(200))
    of_tests = ("PYTHONPATH", "XLA_FLAGS", "T5X_DIFFEQ_CACHE", "JAX_COMPILATION_CACHE_DIR")
    inherited = {name: value for name, value in os.environ.items() if name not in of_tests}
    environment = {**inherited, "HOME": home, "VENV": venv, "XLA_FLAGS": QUICK}

    def run(command):
        return run_to_end(command, env=environment, cwd=tmp_path)

    def run_verb(verb, *arguments):
        return run([python, "-m", f"t5x_diffeq.{verb}", *arguments])

    # The README's command trains, evaluates and generates, from the clone.
    local = run([ROOT / "launch" / "local.sh", "configs/tiny.py", *SMALL, "--workdir=run"])
    assert local.returncode == 0, local.stderr
    assert re.search(r"\(programs: 0 read, \d+ compiled; compilation cache: /", local.stderr)
    assert '"eval/perplexity"' in local.stdout
    cache = home / ".cache" / "t5x_diffeq" / "compilation"
    entries = {path.name for path in cache.glob("*-cache")}
    assert len(entries) > 3

    # The wheel's command, without the clone, continues a run that was interrupted after step 2.
    # Its config is the user's own, and builds on the project's of that folder's name.
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "4")
    (tmp_path / "configs").mkdir()
    own = "from configs import tiny\n\n\ndef get_config():\n    return tiny.get_config()\n"
    (tmp_path / "configs" / "own.py").write_text(own)
    again = run_verb("train", "--config=configs/own.py", *SMALL, "--workdir=run")
    assert again.returncode == 0, again.stderr
    assert f"continuing at step 2 in {tmp_path / 'run'}" in again.stderr
    assert re.search(r"\(programs: [1-9]\d* read, 0 compiled;", again.stderr), again.stderr

    shown = run([venv / "bin" / "t5x_diffeq", "status", "--workdir=run"])
    assert shown.returncode == 0
    assert shown.stdout.startswith(f"{tmp_path / 'run'}: done at step 4"), shown.stdout

    # A process reads what others have compiled.
    code = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)[1]
    code = code.replace("examples/smooth", "run") + textwrap.dedent(
        """
        from t5x_diffeq.system.compilation_cache import enable_cache
        print(enable_cache())
        """
    )
    first, second = (run([python, "-c", code]) for _ in range(2))
    assert second.returncode == 0, second.stderr
    assert re.search(r"programs: [1-9]\d* read, 0 compiled", second.stdout), first.stdout

    for command in (("generate", "--max_tokens=80"), ("evaluate",)):  # as local.sh called them
        kept = {path.name for path in cache.glob("*-cache")}
        assert run_verb(*command, "--workdir=run").returncode == 0
        assert {path.name for path in cache.glob("*-cache")} == kept

    for extra, command in (*WITHOUT_EXTRA.items(), ("data", CHAT)):
        refused = run_verb(*command)
        assert refused.returncode == 2, refused.stderr
        assert refused.stderr.count("\n") == 1, refused.stderr
        assert f"python -m pip install 't5x_diffeq[{extra}]'" in refused.stderr, refused.stderr

    install = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--python", python]
    subprocess.run([*install, f"{wheel}[export]"], check=True)
    assert run_verb(*WITHOUT_EXTRA["export"]).returncode == 0
    assert (tmp_path / "exported" / "model.safetensors").exists()
