"""Where a Hugging Face folder holds each of our parameters: names and shapes, in both directions.

    ours                                    transformers' Linear         GPT-2's Conv1D
    kernel [*inputs, *outputs]              weight [outputs, inputs]     weight [inputs, outputs]
    bias   [*outputs]                       bias [outputs]               bias [outputs]
    norm scale, shift [D]                   weight, bias [D]

Both rotate the pairs (i, i + G/2) of a head by rotary positions, so q and k need no permutation.
Our vocabulary is padded to a multiple of 128, theirs is not. A layout names the leaves that any
block of its kind can have; a model has the leaves that its config asks for.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Float

from t5x_diffeq.model.config import ModelConfig
from t5x_diffeq.model.layers.parameter import Parameter
from t5x_diffeq.model.ode.weight_source import LeafPath
from t5x_diffeq.model.sub_fields import declared_leaves
from t5x_diffeq.system.errors import InputError

Tensors = Iterator[tuple[str, Float[np.ndarray, "..."]]]
ReadTensor = Callable[[str, tuple[int, ...]], Float[np.ndarray, "..."]]


@dataclass(frozen=True)
class Layout:
    """The names and the form of the tensors in a kind of folder."""

    layer: str  # prefix of the names of layer n's tensors, with `{n}` for n
    leaves: Mapping[LeafPath, str]  # the name of each leaf of the block
    outer: Mapping[LeafPath, str]  # the name of each parameter outside the block
    transposed: bool  # whether matrices are `[outputs, inputs]`
    scale_offset: float = 0.0  # what the class adds to the stored scale of a norm


LLAMA = Layout(
    layer="model.layers.{n}.",
    leaves={
        ("attention_norm", "scale"): "input_layernorm.weight",
        ("attention", "query", "kernel"): "self_attn.q_proj.weight",
        ("attention", "key", "kernel"): "self_attn.k_proj.weight",
        ("attention", "value", "kernel"): "self_attn.v_proj.weight",
        ("attention", "output", "kernel"): "self_attn.o_proj.weight",
        ("mlp_norm", "scale"): "post_attention_layernorm.weight",
        ("mlp", "gate", "kernel"): "mlp.gate_proj.weight",
        ("mlp", "up", "kernel"): "mlp.up_proj.weight",
        ("mlp", "down", "kernel"): "mlp.down_proj.weight",
    },
    outer={
        ("token_embedding", "table"): "model.embed_tokens.weight",
        ("final_norm", "scale"): "model.norm.weight",
        ("head",): "lm_head.weight",
    },
    transposed=True,
)

QWEN2 = replace(
    LLAMA,
    leaves={
        **LLAMA.leaves,
        ("attention", "query", "bias"): "self_attn.q_proj.bias",
        ("attention", "key", "bias"): "self_attn.k_proj.bias",
        ("attention", "value", "bias"): "self_attn.v_proj.bias",
    },
)

QWEN3 = replace(
    LLAMA,
    leaves={
        **LLAMA.leaves,
        ("attention", "query_norm", "scale"): "self_attn.q_norm.weight",
        ("attention", "key_norm", "scale"): "self_attn.k_norm.weight",
    },
)

OLMO2 = replace(
    QWEN3,
    leaves={
        **QWEN3.leaves,
        ("attention_norm", "scale"): "post_attention_layernorm.weight",
        ("mlp_norm", "scale"): "post_feedforward_layernorm.weight",
    },
)

GEMMA = replace(LLAMA, scale_offset=1.0)

GPT2 = Layout(
    layer="transformer.h.{n}.",
    leaves={
        ("attention_norm", "scale"): "ln_1.weight",
        ("attention_norm", "shift"): "ln_1.bias",
        ("attention", "qkv", "kernel"): "attn.c_attn.weight",
        ("attention", "qkv", "bias"): "attn.c_attn.bias",
        ("attention", "output", "kernel"): "attn.c_proj.weight",
        ("attention", "output", "bias"): "attn.c_proj.bias",
        ("mlp_norm", "scale"): "ln_2.weight",
        ("mlp_norm", "shift"): "ln_2.bias",
        ("mlp", "up", "kernel"): "mlp.c_fc.weight",
        ("mlp", "up", "bias"): "mlp.c_fc.bias",
        ("mlp", "down", "kernel"): "mlp.c_proj.weight",
        ("mlp", "down", "bias"): "mlp.c_proj.bias",
    },
    outer={
        ("token_embedding", "table"): "transformer.wte.weight",
        ("position_embedding", "table"): "transformer.wpe.weight",
        ("final_norm", "scale"): "transformer.ln_f.weight",
        ("final_norm", "shift"): "transformer.ln_f.bias",
    },
    transposed=False,
)


class TableSizes(NamedTuple):
    """Numbers of rows of a folder's tables."""

    tokens: int  # rows of the embedding and the head
    positions: int  # rows of the learned positions, or the longest sequence


_TORCH_NAMES = {
    "kernel": "weight",
    "scale": "weight",
    "shift": "bias",
    "table": "weight",
    # vLLM renames `query.`, `key.` and `value.` in names, and mistakes `query_norm.` for `query.`.
    "query_norm": "q_norm",
    "key_norm": "k_norm",
}


def torch_name(path: LeafPath) -> str:
    """`attention.query.weight` of `("attention", "query", "kernel")`."""
    return ".".join(_TORCH_NAMES.get(name, name) for name in path)


def diffeq_layout(config: ModelConfig) -> Layout:
    """The layout of `modeling_diffeq.py`, and of the file of a block that has its own."""
    return Layout(
        layer="model.steps.{n}.",
        leaves={path: torch_name(path) for path in declared_leaves(config)},
        outer={
            path: "lm_head.weight" if path == ("head",) else f"model.{torch_name(path)}"
            for path in outer_leaves(config)
        },
        transposed=True,
    )


def outer_leaves(config: ModelConfig) -> dict[LeafPath, tuple[int, ...]]:
    """The shapes of the parameters outside the block, by path."""
    width, tokens = config.embed_dim, config.padded_vocab_rows
    shapes: dict[LeafPath, tuple[int, ...]] = {
        ("token_embedding", "table"): (tokens, width),
        ("final_norm", "scale"): (width,),
    }
    if config.architecture == "gpt":
        shapes["position_embedding", "table"] = (config.max_length, width)
        shapes["final_norm", "shift"] = (width,)
    if not config.has_tied_head:
        shapes["head",] = (width, tokens)
    return shapes


def check_names(layout: Layout, config: ModelConfig, params: dict) -> None:
    """Checks that the layout has a name for every parameter of the model (else: InputError)."""
    block = ("source", "adapters")  # these make the block's parameters
    outer = flatten_dict({name: leaf for name, leaf in params.items() if name not in block})
    nameless = declared_leaves(config).keys() - layout.leaves.keys()
    nameless |= outer.keys() - layout.outer.keys()
    if nameless:
        raise InputError(
            f"the model's parameter {'/'.join(min(nameless))} ({len(nameless)} such) has no name "
            "in a folder of Hugging Face, so this model can't be exported"
        )


def tensors_of(layout: Layout, config: ModelConfig, params: dict, weights: dict) -> Tensors:
    """The names and arrays of a folder's tensors.

    The tensors outside the block come from `params`, and the block's from `weights`: the block's
    tree, with leaves `[N, ...]`. Leaves that write to the residual stream include dt.
    """
    outer = flatten_dict(params)
    for path in outer_leaves(config):
        array = np.asarray(outer[path])
        if path == ("head",):
            array = array[:, : config.vocab_rows].T
        elif path == ("token_embedding", "table"):
            array = array[: config.vocab_rows]
        yield layout.outer[path], array - layout.scale_offset if path[-1] == "scale" else array
    declared = declared_leaves(config)
    for path, stacked in flatten_dict(weights).items():
        for n, leaf in enumerate(np.asarray(stacked)):
            name = layout.layer.format(n=n) + layout.leaves[path]
            yield name, _to_torch(leaf, declared[path], layout)


def params_of(layout: Layout, config: ModelConfig, tables: TableSizes, read: ReadTensor) -> dict:
    """The parameters of a per-layer model from a folder; its tables may have more rows."""
    flat = {}
    for path in outer_leaves(config):
        array = _outer_from_torch(path, read, layout.outer[path], config, tables)
        flat[path] = array + layout.scale_offset if path[-1] == "scale" else array
    for path, leaf in declared_leaves(config).items():
        stacked = np.empty((config.num_steps, *leaf.value.shape), np.float32)
        for n in range(config.num_steps):
            name = layout.layer.format(n=n) + layout.leaves[path]
            stacked[n] = _from_torch(read(name, _stored_shape(leaf, layout)), leaf, layout)
        flat["source", "weights", *path] = stacked
    return unflatten_dict(flat)


def _is_transposed(leaf: Parameter, layout: Layout) -> bool:
    return layout.transposed and leaf.takes_adapter


def _stored_shape(leaf: Parameter, layout: Layout) -> tuple[int, ...]:
    """A leaf's shape in the folder: a `Linear`'s matrix, a vector, or else the declared shape."""
    size = int(np.prod(leaf.value.shape))
    if leaf.role != "kernel":
        return (size,)
    shape = (leaf.fan_in, size // leaf.fan_in) if leaf.takes_adapter else leaf.value.shape
    return shape[::-1] if _is_transposed(leaf, layout) else shape


def _to_torch(
    leaf: Float[np.ndarray, "..."], declared: Parameter, layout: Layout
) -> Float[np.ndarray, "..."]:
    shape = _stored_shape(declared, layout)
    transposed = _is_transposed(declared, layout)
    matrix = leaf.reshape(shape[::-1]).T if transposed else leaf.reshape(shape)
    return matrix - layout.scale_offset if declared.role == "scale" else matrix


def _from_torch(
    stored: Float[np.ndarray, "..."], declared: Parameter, layout: Layout
) -> Float[np.ndarray, "..."]:
    matrix = stored.T if _is_transposed(declared, layout) else stored
    matrix = matrix + layout.scale_offset if declared.role == "scale" else matrix
    return matrix.reshape(declared.value.shape)


def _outer_from_torch(
    path: LeafPath, read: ReadTensor, name: str, config: ModelConfig, tables: TableSizes
) -> Float[np.ndarray, "..."]:
    """A parameter outside the block, with its vocabulary padded with zeros."""
    width = config.embed_dim
    if path[0] == "final_norm":
        return read(name, (width,))
    if path[0] == "position_embedding":
        return read(name, (tables.positions, width))[: config.max_length]
    padded = np.zeros((config.padded_vocab_rows, width), np.float32)
    padded[: config.vocab_rows] = read(name, (tables.tokens, width))[: config.vocab_rows]
    return padded.T if path == ("head",) else padded
