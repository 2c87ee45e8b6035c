"""The base class of weight sources, which make W(t) from t for any Linen block.

A source reads shapes, logical axes and roles from the block itself. It returns the block's
parameter tree with a leading axis of nodes: the weights of a whole forward pass, made at once
before the solver's loop and never inside it. `__call__` is required. All other methods have
defaults, which are correct for any source; a source that knows better can replace them by faster
ones. A config names a source of another package by `model.weights` (`docs/extending.md`).
"""

from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from t5x_diffeq.config.config import ModelKeys
from t5x_diffeq.model.layers.array_types import Times, Weights
from t5x_diffeq.model.layers.parameter import Parameter, flatten_parameters, is_parameter
from t5x_diffeq.system.errors import InputError

# The value of a generated weight whose function of time is zero, for each role that can be
# generated.
OFFSET = {"kernel": 0.0, "bias": 0.0, "scale": 1.0, "shift": 0.0}

LeafPath = tuple[str, ...]
Embeddings = dict[str, Float[Array, "nodes T"]]  # e(t) by the name of the generated layer


class WeightSource(nn.Module):
    """t -> W(t) for any Linen block; the base class of every source.

    A subclass declares parameters by `layers.parameter.declare`, with a logical axis for each
    dimension. The leading axis of a kernel's parameter tells Muon what the parameter is: `steps`, a
    stack of matrices; `time_embed`, the P of W(t) = W0 + P e(t), whose e(t) `with_embeddings`
    returns; any other axis, a matrix itself.
    """

    # the block whose weights are made; an empty module where a source is only asked about itself
    block: nn.Module
    inputs: tuple  # shapes of the block's inputs, for reading its parameters
    config: ModelKeys  # the keys of `config.model`
    num_nodes: int = 0  # how many times a forward pass reads the weights
    dtype: DTypeLike = jnp.float32  # dtype of kernels and biases in use

    # whether W(t) exists at any t in [0, 1], or only at the nodes of the model's grid
    any_time: ClassVar[bool] = True
    constant: ClassVar[bool] = False  # whether W(t) is the same at all t
    # whether the parameters are the weights themselves, in float32; else weights are computed
    stored: ClassVar[bool] = False

    def __call__(self, times: Times) -> Weights:
        """The block's parameter tree at `times`: each leaf `[nodes, ...]`, by `cast_by_role`."""
        raise NotImplementedError

    def with_embeddings(self, times: Times) -> tuple[Weights, Embeddings]:
        """The weights at `times`, and the e(t) of each layer whose weights are W0 + P e(t)."""
        return self(times), {}

    def derivative(self, times: Times) -> Weights:
        """dW/dt at `times`: each leaf `[nodes, ...]`, float32; only where `any_time`."""
        # The clone is in float32, because the tangent of a cast to bfloat16 would be rounded, too.
        exact = self.clone(dtype=jnp.float32, parent=None, name=None)
        params = {"params": self.variables["params"]}
        return jax.jvp(lambda t: exact.apply(params, t), (times,), (jnp.ones_like(times),))[1]

    @nn.nowrap
    def is_smooth(self) -> bool:
        """Whether the weights at the nodes determine W(t) between them."""
        return self.constant

    @nn.nowrap
    def num_polynomials(self) -> int | None:
        """K, if W(t) is a polynomial of t of degree K - 1 at most; else None."""
        return 1 if self.constant else None

    @nn.nowrap
    def flops(self) -> float:
        """FLOPs of making the weights of a forward pass."""
        if self.stored:
            return 0.0
        times = jax.ShapeDtypeStruct((self.num_nodes,), jnp.float32)
        source = self.clone(parent=None, name=None)
        variables = jax.eval_shape(source.init, jax.random.key(0), times)
        analysis = jax.jit(source.apply).lower(variables, times).cost_analysis()
        return float(analysis.get("flops", 0.0))  # type: ignore[union-attr]  # XLA's is a dict

    @nn.nowrap
    def describe(self) -> str:
        """A phrase for the account of a run."""
        return f"W(t) by {self.config.weights}"


def block_parameters(block: nn.Module, inputs: tuple) -> dict[LeafPath, Parameter]:
    """The block's parameters by path, with shapes in place of arrays; nothing is computed.

    Raises:
      InputError: if the block has no leaf; or if a leaf was not made by `declare` in a layer of the
        block, or has a role that no source generates.
    """
    variables = jax.eval_shape(block.clone(parent=None, name=None).init, jax.random.key(0), *inputs)
    leaves = flatten_parameters(variables.get("params", {}))
    if not leaves:
        raise InputError(
            "the block of model.block has no parameters, so there is nothing to train; let f or g "
            "have a layer, such as t5x_diffeq.model.layers.linear.Linear"
        )
    for path, leaf in leaves.items():
        role = leaf.role if is_parameter(leaf) else None
        if role not in OFFSET:
            raise InputError(
                f"model.block: the parameter {'/'.join(path)} is of the role {role!r}; "
                f"the roles are {', '.join(OFFSET)}: declare it by t5x_diffeq.model.layers."
                "parameter.declare, or take the package's layers, such as Linear for nn.Dense"
            )
        if len(path) < 2:
            raise InputError(
                f"the block declares {path[0]!r} itself; a layer of the block must declare it"
            )
    return leaves


def is_projection(leaf: Parameter) -> bool:
    """Whether a source's parameter is the P of P e(t)."""
    return leaf.role != "time_embedding" and leaf.names[:1] == ("time_embed",)


def layer_name(path: LeafPath) -> str:
    """The name, in the source's parameters, of the block's linear or norm at `path`."""
    return ".".join(path)


def init_block(block: nn.Module, inputs: tuple, key: jax.Array) -> Weights:
    """Parameters of the block, initialised as it says, in their boxes."""
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), inputs)
    return block.clone(parent=None, name=None).init(key, *zeros)["params"]


def dtype_in_use(role: str, dtype: DTypeLike) -> DTypeLike:
    """Kernels and biases are used in the model's dtype, norms in float32."""
    return dtype if role in ("kernel", "bias") else jnp.float32


def cast_by_role(
    weights: Weights, declared: dict[LeafPath, Parameter], dtype: DTypeLike
) -> Weights:
    """Each leaf in the dtype in which the block uses it; devices then exchange it in that dtype."""
    return unflatten_dict(
        {
            path: leaf.astype(dtype_in_use(declared[path].role, dtype))
            for path, leaf in flatten_dict(weights).items()
        }
    )
