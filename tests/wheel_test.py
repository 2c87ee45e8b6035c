"""The built distribution: checked by twine, and used where there is no clone."""

import os
import re
import shutil
import subprocess
import sys
import tomllib

import pytest
from compilation import QUICK
from environments import make_environment
from helpers import ROOT, numbered_lines
from packaging.requirements import Requirement

from t5x_diffeq.runtime.extras import EXTRAS


def test_extras_have_their_packages():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for package, extra in EXTRAS.items():
        wanted = {Requirement(line).name for line in project["optional-dependencies"][extra]}
        assert package in {name.replace("-", "_") for name in wanted}, package


@pytest.mark.slow
def test_a_wheel_trains_evaluates_and_exports(tmp_path):
    """In an environment without extras; what needs one names it, and works once it is there."""
    build = [sys.executable, "-m", "uv", "build", "--quiet", "--out-dir", tmp_path / "dist", ROOT]
    subprocess.run(build, check=True)
    (wheel,), (sdist,) = (tmp_path / "dist").glob("*.whl"), (tmp_path / "dist").glob("*.tar.gz")
    python = make_environment(tmp_path / "environment", str(wheel), "twine")
    subprocess.run([python, "-m", "twine", "check", "--strict", wheel, sdist], check=True)
    (tmp_path / "text.txt").write_text(numbered_lines(200))
    # One's own config, which builds on the project's of that folder's name.
    (tmp_path / "configs").mkdir()
    mine = "from configs import tiny\n\n\ndef get_config():\n    return tiny.get_config()\n"
    (tmp_path / "configs" / "mine.py").write_text(mine)

    def run(verb, *arguments):
        inherited = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "XLA_FLAGS")}
        environment = {**inherited, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": QUICK}
        command = [python, "-m", f"t5x_diffeq.{verb}", *arguments]
        return subprocess.run(
            command, env=environment, cwd=tmp_path, capture_output=True, text=True
        )

    small = {"train.total_steps": 2, "train.batch_size": 8, "train.eval_batch_size": 8}
    small |= {"model.num_steps": 2, "model.embed_dim": 16, "model.mlp_dim": 32}
    small |= {"data.source": "text_files", "data.path": "text.txt", "data.tokenizer": "bytes"}
    small |= {"data.sequence_length": 16}
    keys = [f"--config.{key}={value}" for key, value in small.items()]
    for verb, arguments, said in (
        ("train", ["--config=configs/mine.py", "--workdir=run", *keys], r"\ndone in "),
        ("evaluate", ["--workdir=run"], "perplexity"),
        ("generate", ["--workdir=run", "--prompt=line", "--max_tokens=2"], "line"),
    ):
        ended = run(verb, *arguments)
        assert ended.returncode == 0, ended.stderr
        assert re.search(said, ended.stdout + ended.stderr)
    export = ("export", "--workdir=run", "--output=exported")
    refused = run(*export)
    assert refused.returncode == 2
    assert refused.stderr.count("\n") == 1
    assert "pip install 't5x_diffeq[export]'" in refused.stderr
    install = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--python", python]
    subprocess.run([*install, f"{wheel}[export]"], check=True)
    assert run(*export).returncode == 0
    assert (tmp_path / "exported" / "model.safetensors").exists()
    shutil.rmtree(tmp_path / "environment")
