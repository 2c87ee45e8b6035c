"""Adapters that PEFT tuned on an exported model, as a run of ours: the reverse of `peft.py`.

The base is the run that was exported. Its weights on the exported grid become layers, as
`finetune` has them, and PEFT's factors become their adapters.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from t5x_diffeq.exchange.families import family_of
from t5x_diffeq.exchange.layouts import Layout, own_layout
from t5x_diffeq.exchange.peft import CONFIG, PREFIX, TENSORS, module_name
from t5x_diffeq.layers.parameter import num_inputs
from t5x_diffeq.models.config import ModelConfig
from t5x_diffeq.models.sub_fields import declared_leaves
from t5x_diffeq.runs.load import PretrainedRun
from t5x_diffeq.runtime.config import Config
from t5x_diffeq.runtime.errors import InputError
from t5x_diffeq.runtime.files import parse_json
from t5x_diffeq.training.setup import make_setup

Tensors = Mapping[str, np.ndarray]

# What changes the meaning of the factors, and the values with which it doesn't.
_PLAIN: dict[str, tuple] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    **dict.fromkeys(
        (
            "use_dora",
            "use_rslora",
            "rank_pattern",
            "alpha_pattern",
            "layers_to_transform",
            "modules_to_save",
            "trainable_token_indices",
            "target_parameters",
            "layer_replication",
        ),
        (None, False, {}, []),
    ),
}


def holds_adapters(folder: Path) -> bool:
    """Whether a folder is one of PEFT's."""
    return (folder / CONFIG).exists()


def adapted_run(folder: Path, base: PretrainedRun) -> tuple[Config, dict]:
    """The config and the parameters of the base with PEFT's adapters.

    Args:
      folder: what PEFT's `save_pretrained` wrote.
      base: the run whose export was tuned.

    Raises:
      InputError: if the folder holds anything but adapters of the base's layers.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    written = _read_config(folder)
    try:
        tensors = load_file(folder / TENSORS)
    except (OSError, SafetensorError) as error:
        raise InputError(
            f"--input={folder}: {TENSORS} can't be read ({error}); save the adapters again with "
            "PEFT's save_pretrained"
        ) from error
    keys = replace(
        base.config.model,
        weights="per_layer",
        num_steps=_num_layers(tensors, base.model, folder),
        adapter_rank=int(written["r"]),
        adapter_alpha=float(written["lora_alpha"]),
        adapter_kernels=(),
    )
    config = ModelConfig.of(keys, base.vocab_size, base.config.data.sequence_length)
    adapters = _read_factors(tensors, _layout_of(base.model, config.num_steps), config)
    kernels = {linear.split(".")[-1] for linear in adapters}
    everything = {path[-2] for path, leaf in declared_leaves(config).items() if leaf.takes_adapter}
    keys = replace(keys, adapter_kernels=() if kernels == everything else tuple(sorted(kernels)))
    as_run = replace(base.config, model=keys)
    setup = make_setup(as_run, base.vocab_size, jax.devices()[:1])
    with setup.context():
        params, _ = base.params_for(setup)
    return as_run, {**params, "adapters": adapters}


def _read_config(folder: Path) -> Mapping[str, Any]:
    if not holds_adapters(folder):
        raise InputError(
            f"--input={folder} has no {CONFIG}; with --base, --input is the folder that PEFT's "
            "save_pretrained wrote"
        )
    try:
        written = parse_json((folder / CONFIG).read_text())
    except ValueError as error:
        raise InputError(f"{folder / CONFIG} is damaged ({error}); restore it") from error
    for key, plain in _PLAIN.items():
        if written.get(key, plain[0]) not in plain:
            raise InputError(
                f"--input={folder}: {key} is {written[key]!r}, and adapters come back with "
                f"{plain[0]!r} alone; merge them in PEFT (merge_and_unload) and convert the model"
            )
    return written


def _layout_of(config: ModelConfig, num_steps: int) -> Layout:
    """The layout in which `export` writes the model on this grid."""
    on_grid = config.at_depth(num_steps)
    plain = family_of(on_grid)
    return plain[1].layout if plain else own_layout(on_grid)


def _num_layers(tensors: Tensors, config: ModelConfig, folder: Path) -> int:
    """The number of layers that have adapters."""
    before, _, after = (PREFIX + _layout_of(config, config.num_steps).layer).partition("{n}")
    layers = {
        name.removeprefix(before).partition(after)[0] for name in tensors if name.startswith(before)
    }
    if not layers or layers != set(map(str, range(len(layers)))):
        raise InputError(
            f"--input={folder} has no adapters for the layers {before}0, {before}1 ... of the "
            "export of --base; name the run whose export was tuned"
        )
    return len(layers)


def _read_factors(tensors: Tensors, layout: Layout, config: ModelConfig) -> dict:
    """`a` and `b` of each linear that has them, leaves `[layers, ...]`.

    Raises:
      InputError: if one is missing or has another shape, or a tensor isn't an adapter's.
    """
    adapters, left = {}, dict(tensors)
    for path, kernel in declared_leaves(config).items():
        if not kernel.takes_adapter:
            continue
        module = PREFIX + layout.layer + module_name(layout, path[:-1])
        if f"{module.format(n=0)}.lora_A.weight" not in tensors:
            continue
        shape, r, inputs = kernel.value.shape, config.adapter_rank, kernel.fan_in
        outputs, axis = int(np.prod(shape)) // inputs, num_inputs(shape, inputs)
        a, b = (
            [
                _take(left, f"{module.format(n=n)}.{name}.weight", size)
                for n in range(config.num_steps)
            ]
            for name, size in (("lora_A", (r, inputs)), ("lora_B", (outputs, r)))
        )
        scale = config.dt if kernel.writes_residual else 1.0
        adapters[".".join(path[:-1])] = {
            "a": np.stack([x.T.reshape(*shape[:axis], r) for x in a]),
            "b": np.stack([x.T.reshape(r, *shape[axis:]) / scale for x in b]),
        }
    if left:
        raise InputError(
            f"--input: {min(left)} ({len(left)} such) is not an adapter of a linear of the base's "
            "layers; tune only these (target_modules)"
        )
    return adapters


def _take(left: dict[str, np.ndarray], name: str, shape: tuple[int, int]) -> np.ndarray:
    """Removes a tensor from those that are left, and returns it in float32."""
    if name not in left:
        raise InputError(f"--input lacks {name}, and other layers have it")
    if left[name].shape != shape:
        raise InputError(f"--input: {name} has the shape {left[name].shape}, and needs {shape}")
    return left.pop(name).astype(np.float32)
