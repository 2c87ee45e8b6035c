"""Adapters in PEFT's form: a folder of two files, which `export` puts inside the base's folder.

    ours                    PEFT's
    a [*inputs, r]          lora_A.weight [r, inputs]
    b [r, *outputs]         lora_B.weight [outputs, r], including the step size, as base kernels do

Both scale the product by alpha / r.
"""

import json
from pathlib import Path

import numpy as np

from t5x_diffeq.data.chat_template import read_settings
from t5x_diffeq.hf.layouts import Layout
from t5x_diffeq.model.config import ModelConfig
from t5x_diffeq.model.sub_fields import declared_leaves
from t5x_diffeq.system.errors import InputError

ADAPTER_FOLDER = "adapter"  # inside the base's folder
_TENSORS, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
_PREFIX = "base_model.model."  # of the names of tensors
# The kinds of adapters that PEFT 0.21 can merge into a model's weights, whatever tokens it reads.
_MERGED = {
    *("ADALORA", "ADAMSS", "BEFT", "BOFT", "BONE", "C3A", "DEFT", "DELORA", "FOURIERFT", "FROD"),
    *("GLORA", "GRALORA", "HIRA", "HRA", "IA3", "LILY", "LN_TUNING", "LOHA", "LOKR", "LORA"),
    *("MISS", "OFT", "OSF", "PEANUT", "PSOFT", "PVERA", "RANDLORA", "ROAD", "SHIRA", "TINYLORA"),
    *("TRAINABLE_TOKENS", "UNILORA", "VBLORA", "VERA", "WAVEFT"),
}
# Keys of LoRA's variants that act on some tokens alone, or choose among several adapters.
_UNMERGED_KEYS = ("alora_invocation_tokens", "arrow_config")


def check_no_adapters(folder: Path) -> None:
    """Raises an InputError that says what can be converted instead, if the folder is PEFT's."""
    if not (folder / ADAPTER_CONFIG).exists():
        return
    settings = read_settings(folder / ADAPTER_CONFIG)
    holds = f"--input={folder} holds PEFT's adapters, not a model"
    by_tokens = next((key for key in _UNMERGED_KEYS if settings.get(key)), None)
    if settings.get("peft_type") in _MERGED and by_tokens is None:
        raise InputError(
            f"{holds}; merge them in PEFT (merge_and_unload), save the model and the tokenizer, "
            "and convert that folder"
        )
    kind = f"{settings.get('peft_type')}{f' with {by_tokens}' if by_tokens else ''}"
    raise InputError(
        f"{holds}, of a kind that can't be merged into one ({kind}); convert the model that they "
        f"were made for ({settings.get('base_model_name_or_path')}), and tune it with finetune"
    )


def write_adapters(
    layout: Layout, config: ModelConfig, params: dict, folder: Path, base: str
) -> None:
    """Makes `folder` and writes the adapters into it.

    Args:
      folder: `adapter` inside the base's folder.
      base: final path of the base's folder.
    """
    from safetensors.numpy import save_file

    folder.mkdir()
    declared = declared_leaves(config)
    tensors = {}
    for linear, factors in params["adapters"].items():
        path = tuple(linear.split("."))
        scale = config.dt if declared[*path, "kernel"].writes_residual else 1.0
        for n, (a, b) in enumerate(zip(*(np.asarray(factors[x]) for x in "ab"), strict=True)):
            name = _PREFIX + layout.layer.format(n=n) + _module_name(layout, path)
            tensors[f"{name}.lora_A.weight"] = a.reshape(-1, a.shape[-1]).T
            tensors[f"{name}.lora_B.weight"] = scale * b.reshape(len(b), -1).T
    tensors = {name: np.ascontiguousarray(factor, np.float32) for name, factor in tensors.items()}
    save_file(tensors, folder / _TENSORS, metadata={"format": "pt"})
    content = json.dumps(_adapter_config(layout, config, params, base), indent=2)
    (folder / ADAPTER_CONFIG).write_text(content + "\n", "utf-8")


def _adapter_config(layout: Layout, config: ModelConfig, params: dict, base: str) -> dict:
    """The content of `adapter_config.json`; `base` is the final path of the base's folder."""
    modules = {_module_name(layout, tuple(linear.split("."))) for linear in params["adapters"]}
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


def _module_name(layout: Layout, path: tuple[str, ...]) -> str:
    """The name, within a layer, of the linear at `path`."""
    return layout.leaves[*path, "kernel"].removesuffix(".weight")
