"""Adapters as PEFT has them: a folder of two files beside the base that they were trained on.

    ours                    PEFT's
    a [*inputs, r]          lora_A.weight [r, inputs]
    b [r, *outputs]         lora_B.weight [outputs, r], the step size in it as in the base's kernel

The product counts alpha / r times here as there.
"""

import json
from pathlib import Path

import numpy as np

from t5x_diffeq.exchange.layouts import Layout, Tensors, declared_leaves
from t5x_diffeq.models.config import ModelConfig
from t5x_diffeq.runtime.errors import InputError

FOLDER = "adapter"  # in the base's
TENSORS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


def check_adapters(config: ModelConfig) -> None:
    """There are adapters.

    Raises:
      InputError: if not.
    """
    if not config.adapter_rank:
        raise InputError(
            "--peft needs a run with adapters, of `finetune --config=configs/finetune.py:lora`, "
            "and this one has none; leave it out"
        )


def write_adapters(
    layout: Layout, config: ModelConfig, params: dict, folder: Path, base: str
) -> None:
    """Writes them into `folder`, which is made.

    Args:
      layout: of the base's folder.
      config: of the model.
      params: its parameters.
      folder: `adapter` in the base's.
      base: where the base's folder will be.
    """
    from safetensors.numpy import save_file

    folder.mkdir()
    tensors = {
        name: np.ascontiguousarray(tensor, np.float32)
        for name, tensor in adapter_tensors(layout, config, params)
    }
    save_file(tensors, folder / TENSORS, metadata={"format": "pt"})
    content = json.dumps(adapter_config(layout, config, params, base), indent=2)
    (folder / CONFIG).write_text(content + "\n")


def adapter_tensors(layout: Layout, config: ModelConfig, params: dict) -> Tensors:
    """Names and arrays of `adapter_model.safetensors`."""
    declared = declared_leaves(config)
    for linear, factors in params["adapters"].items():
        path = tuple(linear.split("."))
        scale = config.dt if declared[*path, "kernel"].writes_residual else 1.0
        for n, (a, b) in enumerate(zip(*(np.asarray(factors[x]) for x in "ab"), strict=True)):
            name = "base_model.model." + layout.layer.format(n=n) + module_name(layout, path)
            yield f"{name}.lora_A.weight", a.reshape(-1, a.shape[-1]).T
            yield f"{name}.lora_B.weight", scale * b.reshape(len(b), -1).T


def adapter_config(layout: Layout, config: ModelConfig, params: dict, base: str) -> dict:
    """`adapter_config.json`; `base` is where the base's folder will be."""
    modules = {module_name(layout, tuple(linear.split("."))) for linear in params["adapters"]}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": config.adapter_rank,
        "lora_alpha": config.adapter_alpha,
        "target_modules": sorted(modules),
        "fan_in_fan_out": not layout.transposed,
        "bias": "none",
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "inference_mode": True,
    }


def module_name(layout: Layout, path: tuple[str, ...]) -> str:
    """`self_attn.q_proj`, of the folder's layer."""
    return layout.leaves[*path, "kernel"].removesuffix(".weight")
