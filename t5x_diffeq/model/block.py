"""The base class of blocks: the two sub-fields f and g of a vector field, and optional methods.

A block is an ordinary Linen module that knows nothing of time, step size or residual stream. Its
linears and norms declare the role and the logical axes of their parameters
(`layers.parameter.declare`), so a weight source can make them for any t. `docs/extending.md` shows
how to write a block; a config names it by `model.block`. f and g are required. The other methods
are optional: each serves some verbs, which refuse a block without the method.
"""

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Bool, Float

from t5x_diffeq.model.config import ModelConfig
from t5x_diffeq.model.layers.array_types import Cache, Places, State, Weights
from t5x_diffeq.model.layers.attention_kernels import LANES
from t5x_diffeq.model.layers.context import length_shards
from t5x_diffeq.model.layers.mesh import mesh_axes, shards_over
from t5x_diffeq.model.ode.weight_source import block_parameters
from t5x_diffeq.system.errors import InputError

Matrices = Any  # arrays of NumPy or of JAX
Factors = dict[str, tuple[Float[Matrices, "nodes *many D M"], Float[Matrices, "nodes *many M D"]]]


class SubFieldFlops(NamedTuple):
    """FLOPs per token of one evaluation of a sub-field on a sequence, forward."""

    products: float  # matrix products with the weights that a token uses
    # what tokens compute with each other, averaged over the positions of the sequence
    mixing: float = 0.0
    # the part of `products` whose result is added to the residual stream: the backward pass doesn't
    # need the result, so it isn't recomputed
    last: float = 0.0
    # the parts of `products` that `model.remat=keep:NAME` stores, by name
    named: Mapping[str, float] = {}


class PyTorchForm(NamedTuple):
    """How the library transformers reads a model that is made of a block."""

    # the Python file that defines the model; it is copied beside the weights, as is
    # `modeling_diffeq.py`, from which it can import
    modeling: Path
    config_class: str  # the name of its `PretrainedConfig`
    base_class: str  # the name of its model without a head
    model_class: str  # the name of its causal language model
    # the entries of `config.json` that the file reads, besides those of `modeling_diffeq.py`
    config: Mapping[str, Any]


class Block(nn.Module):
    """A vector field f + g, made of ordinary Linen layers; the base class of every block."""

    # the model's config. A subclass can have further attributes with defaults, which a config sets
    # as arguments: `model.block="package.module:Name(size=4)"`.
    config: ModelConfig

    scopes: ClassVar[tuple[str, str]] = ("f", "g")  # what a profile calls the operations of f and g
    has_attention_kernel: ClassVar[bool] = False  # whether f calls the kernel of `config.attention`
    splits_length: ClassVar[bool] = False  # whether f heeds `Places.order`, as mesh.context needs
    needs: ClassVar[Mapping[str, Any]] = {}  # keys that must have one certain value, and the value

    def f(self, y: State, places: Places, deterministic: bool = True) -> State:
        """The sub-field that mixes tokens: its value at y, in `config.state_dtype`."""
        raise NotImplementedError

    def g(self, y: State, deterministic: bool = True) -> State:
        """The sub-field of each token by itself: its value at y, in `config.state_dtype`."""
        raise NotImplementedError

    def __call__(self, y: State, places: Places) -> State:
        """f + g."""
        return self.f(y, places) + self.g(y)

    @nn.nowrap
    def input_shapes(self) -> tuple[jax.ShapeDtypeStruct, Places]:
        """Shapes of small inputs, from which `init` makes the block's parameters.

        Every attention kernel accepts their length, and each shard of the batch has one row.
        """
        c = self.config
        shape = shards_over(mesh_axes("batch")), min(c.max_length, LANES * length_shards())
        state = jax.ShapeDtypeStruct((*shape, c.embed_dim), jnp.dtype(c.state_dtype))
        positions = jax.ShapeDtypeStruct(shape, jnp.int32)
        return state, Places(positions)  # type: ignore[arg-type]  # a shape stands for its array

    # --------------------------------------------------------------- optional methods: generation
    @nn.nowrap
    def empty_cache(self, batch_size: int, length: int) -> Cache:
        """The empty cache of one evaluation of f: arrays by name.

        Args:
          batch_size: number of sequences.
          length: the most tokens of a sequence.
        """
        raise self.lacks("empty_cache")

    def extend(
        self, y: State, places: Places, real: Bool[Array, "B L"], cache: Cache
    ) -> tuple[State, Cache]:
        """f of new tokens, and the cache with the new tokens added.

        Args:
          y: the state of the new tokens, which follow the cached ones.
          places: the places of the new tokens; the positions of real tokens continue the cache's.
          real: whether each new token belongs to its sequence; else it is padding at the row's end.
          cache: what `empty_cache` or `extend` returned.
        """
        raise self.lacks("extend")

    # --------------------------------------------------------------- optional methods: FLOPs
    @nn.nowrap
    def flops(self, length: int) -> tuple[SubFieldFlops, SubFieldFlops]:
        """The FLOPs of f and of g on sequences of `length` tokens."""
        raise self.lacks("flops")

    # --------------------------------------------------------------- optional methods: export
    @nn.nowrap
    def pytorch_form(self) -> PyTorchForm:
        """The PyTorch file that computes the block.

        Its tensors are named by the block's paths, as in `steps.0.mlp.up.weight`. The kernel of a
        `Linear` is `[outputs, inputs]`, any other leaf as it is declared; leaves that write to the
        residual stream are multiplied by the step size.
        """
        raise self.lacks("pytorch_form")

    # --------------------------------------------------------------- optional methods: analysis
    @nn.nowrap
    def spectral_factors(self, weights: Weights) -> Factors:
        """The factors (A, B), by name, of each product A B whose eigenvalues `analyze` shows.

        Args:
          weights: the block's tree, leaves `[nodes, ...]`. The leaves are float64 arrays of NumPy
            for `analyze`, and traced arrays of JAX for `train.figure_every`, so use only the
            methods that both have.
        """
        raise self.lacks("spectral_factors")

    def attention_matrix(self, y: State, places: Places) -> Float[Array, "B H L L"]:
        """How much each token (third axis) takes from each token (fourth axis); rows sum to 1."""
        raise self.lacks("attention_matrix")

    @nn.nowrap
    def lacks(self, method: str) -> InputError:
        """The error that the block has no such method; it says what the method is for."""
        return InputError(
            f"{_OPTIONAL[method][0]} needs the method `{method}` of the block, and "
            f"{type(self).__name__} of model.block={self.config.block} has none; "
            "docs/extending.md says what it returns"
        )


_OPTIONAL = {  # what each method is for, and the sub-fields that the method describes
    "empty_cache": ("generation", "f"),
    "extend": ("generation", "f"),
    "flops": ("counting FLOPs", "fg"),
    "pytorch_form": ("export", "fg"),
    "spectral_factors": ("the analysis of spectra", "fg"),
    "attention_matrix": ("attention rollout", "f"),
}


def overrides_method(kind: type[Block], method: str) -> bool:
    """Whether a class of blocks has this optional method, for its own f and g.

    An inherited method doesn't count if the class replaces a sub-field that the method describes.
    """
    if getattr(kind, method) is getattr(Block, method):
        return False
    _, described = _OPTIONAL[method]
    return all(_depth(kind, method) <= _depth(kind, sub_field) for sub_field in described)


def can_split_length(kind: type[Block]) -> bool:
    """Whether a class of blocks declares `Block.splits_length` for its own f."""
    return kind.splits_length and _depth(kind, "splits_length") <= _depth(kind, "f")


def _depth(kind: type[Block], name: str) -> int:
    """The place, in the class's method resolution order, of the class that defines `name`."""
    return next(n for n, base in enumerate(kind.__mro__) if name in vars(base))


def kernel_flops(block: Block) -> dict[tuple[str, ...], float]:
    """FLOPs per token of the product with each of the block's kernels, by path."""
    leaves = block_parameters(block, block.input_shapes()).items()
    return {path: 2.0 * prod(leaf.value.shape) for path, leaf in leaves if leaf.role == "kernel"}
