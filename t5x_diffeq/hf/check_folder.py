"""Checks an exported folder before it gets its name: PyTorch must compute the run's logits."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from t5x_diffeq.hf.torch_logits import CANNOT_COMPARE
from t5x_diffeq.model.config import ModelConfig
from t5x_diffeq.model.language_model import LanguageModel
from t5x_diffeq.system.errors import RunError

TOLERANCE = 1e-4  # of the largest logit; float32 alone makes differences of about 1e-6
_SCRIPT = Path(__file__).with_name("torch_logits.py")


def compare_logits(
    folder: Path, model_class: str, config: ModelConfig, params: dict, adapter: Path | None = None
) -> str:
    """Compares the logits of a folder's model in PyTorch with the run's; the outcome, in words.

    The logits are in float32. If they can't be compared, the outcome says why. `adapter` is the
    folder of the model's adapters, if they aren't merged.

    Raises:
      RunError: if PyTorch can't read the folder, or the logits differ.
    """
    shape = (2, min(32, config.max_length))
    tokens = np.random.default_rng(0).integers(config.vocab_size, size=shape)
    with tempfile.TemporaryDirectory() as scratch:
        inputs, outputs = Path(scratch, "tokens.npy"), Path(scratch, "logits.npy")
        np.save(inputs, tokens)
        arguments = [folder, model_class, inputs, outputs, *([adapter] if adapter else [])]
        environment = {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "HF_HOME": f"{scratch}/home",  # transformers copies the folder's code to it
            "CUDA_VISIBLE_DEVICES": "",
        }
        # -P: else this folder would be first on the path, and could hide modules of PyTorch.
        ended = subprocess.run(
            [python(), "-P", str(_SCRIPT), *map(str, arguments)],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if ended.returncode == CANNOT_COMPARE:
            return f"not compared with PyTorch's: {ended.stdout.strip()}"
        if ended.returncode:
            last = (ended.stderr.strip().splitlines() or ["no message"])[-1]
            raise RunError(
                f"{model_class} can't read the exported folder: {last}; nothing is exported"
            )
        theirs = np.load(outputs)[..., : config.vocab_size]
    ours = _logits_of_run(config, params, tokens)
    difference = float(np.abs(theirs - ours).max() / np.abs(ours).max())
    if not difference <= TOLERANCE:
        raise RunError(
            f"{model_class} computes different logits from the exported tensors than the run: they "
            f"differ by {difference:.1e} of the largest; nothing is exported, please report this"
        )
    return f"PyTorch's, to {difference:.1e} of the largest"


def python() -> str:
    """The interpreter that has PyTorch, if it is installed."""
    return sys.executable


def _logits_of_run(
    config: ModelConfig, params: dict, tokens: Int[np.ndarray, "B L"]
) -> Float[np.ndarray, "B L V"]:
    model = LanguageModel(config.in_float32())
    with jax.default_matmul_precision("highest"):
        logits = jax.jit(model.apply)({"params": params}, jnp.asarray(tokens))
    return np.asarray(logits)[..., : config.vocab_size]
