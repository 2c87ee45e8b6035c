"""Checks of a folder before it is handed over: its tensors, and its logits in PyTorch."""

import os
import subprocess
import sys
import tempfile
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from t5x_diffeq.exchange.folder import TensorFiles
from t5x_diffeq.exchange.layouts import Layout, tensor_shapes
from t5x_diffeq.exchange.torch_logits import CANNOT_COMPARE
from t5x_diffeq.models.config import ModelConfig
from t5x_diffeq.models.language_model import LanguageModel
from t5x_diffeq.runtime.errors import RunError

TOLERANCE = 1e-4  # of the largest logit; float32 alone makes differences of about 1e-6
_SHAPE = (2, 32)  # of the tokens that are compared, at most
_SCRIPT = Path(__file__).with_name("torch_logits.py")
_NEEDED = ("torch", "transformers")


def check_tensors(folder: Path, layout: Layout, config: ModelConfig) -> None:
    """Reads the written names and shapes back, and compares them with those of the model.

    Raises:
      RunError: if a tensor is missing, there twice, of another shape, or of no parameter.
    """
    named = tensor_shapes(layout, config)
    twice = [name for name, count in Counter(name for name, _ in named).items() if count > 1]
    if twice:
        raise RunError(f"two parameters of the model have the name {twice[0]}; nothing is exported")
    wanted, found = dict(named), TensorFiles(folder).shapes()
    for name in sorted(wanted.keys() | found.keys()):
        if wanted.get(name) != found.get(name):
            raise RunError(
                f"the exported tensor {name} is {found.get(name, 'missing')}, and the model's is "
                f"{wanted.get(name, 'missing')}; nothing is exported"
            )


def compare_logits(
    folder: Path, model_class: str, config: ModelConfig, params: dict, adapter: Path | None = None
) -> str:
    """Compares the logits of a folder's model in PyTorch with the run's, in float32.

    Args:
      folder: the folder.
      model_class: the class that reads it.
      config: config of the run's model.
      params: its parameters.
      adapter: the folder of its adapters, if they are not merged.

    Returns:
      What was found, in words, or why nothing could be compared.

    Raises:
      RunError: if PyTorch can't read the folder, or the logits differ.
    """
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing and python() == sys.executable:
        return f"not compared with PyTorch's: {' and '.join(missing)} not installed"
    shape = (_SHAPE[0], min(_SHAPE[1], config.max_length))
    tokens = np.random.default_rng(0).integers(config.vocab_size, size=shape)
    with tempfile.TemporaryDirectory() as scratch:
        theirs, reason = _torch_logits(folder, model_class, tokens, adapter, Path(scratch))
    if theirs is None:
        return f"not compared with PyTorch's: {reason}"
    ours = _own_logits(config, params, tokens)
    difference = float(np.abs(theirs - ours).max() / np.abs(ours).max())
    if not difference <= TOLERANCE:
        raise RunError(
            f"{model_class} computes other logits from the exported tensors than the run: they "
            f"differ by {difference:.1e} of the largest; nothing is exported, please report this"
        )
    return f"PyTorch's, to {difference:.1e} of the largest"


def python() -> str:
    """The interpreter that has PyTorch, if it is installed."""
    return sys.executable


def _own_logits(
    config: ModelConfig, params: dict, tokens: Int[np.ndarray, "B L"]
) -> Float[np.ndarray, "B L V"]:
    model = LanguageModel(config.in_float32())
    with jax.default_matmul_precision("highest"):
        logits = jax.jit(model.apply)({"params": params}, jnp.asarray(tokens))
    return np.asarray(logits)[..., : config.vocab_size]


def _torch_logits(
    folder: Path,
    model_class: str,
    tokens: Int[np.ndarray, "B L"],
    adapter: Path | None,
    scratch: Path,
) -> tuple[Float[np.ndarray, "B L V"] | None, str]:
    """The logits, or None and the reason.

    Raises:
      RunError: if PyTorch can't read the folder.
    """
    inputs, outputs = scratch / "tokens.npy", scratch / "logits.npy"
    np.save(inputs, tokens)
    arguments = [folder, model_class, inputs, outputs, *([adapter] if adapter else [])]
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(scratch / "home"),  # where it would copy the folder's code to
        "CUDA_VISIBLE_DEVICES": "",
    }
    # -P: this file's folder has a peft.py of its own.
    ended = subprocess.run(
        [python(), "-P", str(_SCRIPT), *map(str, arguments)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if ended.returncode == CANNOT_COMPARE:
        return None, ended.stdout.strip()
    if ended.returncode:
        last = (ended.stderr.strip().splitlines() or ["no message"])[-1]
        raise RunError(f"{model_class} can't read the exported folder: {last}; nothing is exported")
    return np.load(outputs), ""
