"""Low-rank adapters (LoRA, Hu et al. 2021): `x W + (alpha / rank) (x a) b` at each node of a grid.

Adapters are stacked over the nodes, as layer weights are. No weight source makes them: they are
parameters of their own, and reach the block's linears in the tree of weights, under the name
`ADAPTERS`.
"""

from math import sqrt

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from t5x_diffeq.model.layers.array_types import Weights
from t5x_diffeq.model.layers.linear import ADAPTERS
from t5x_diffeq.model.layers.parameter import Parameter, declare, num_inputs
from t5x_diffeq.model.ode.weight_source import LeafPath, block_parameters
from t5x_diffeq.system.errors import InputError


class Adapter(nn.Module):
    """The factors a and b of the product that is added to one kernel, at every node.

    b is zero at initialisation, so the model begins as it was without the adapter.
    """

    kernel: Parameter
    num_inputs: int  # how many of the kernel's leading dimensions are inputs
    num_nodes: int
    rank: int  # rank r of the product
    scale: float  # factor on the product
    dtype: DTypeLike

    @nn.compact
    def __call__(self) -> dict[str, Float[Array, "nodes ..."]]:
        """`a`, `[nodes, *inputs, r]`, and `b`, `[nodes, r, *outputs]`, multiplied by the scale."""
        shape, axes = self.kernel.value.shape, self.kernel.names
        inputs, outputs = slice(None, self.num_inputs), slice(self.num_inputs, None)
        a = declare(
            self,
            "a",
            nn.initializers.normal(1 / sqrt(self.kernel.fan_in)),
            (self.num_nodes, *shape[inputs], self.rank),
            ("steps", *axes[inputs], None),
            "adapter",
        )
        b = declare(
            self,
            "b",
            nn.initializers.zeros,
            (self.num_nodes, self.rank, *shape[outputs]),
            ("steps", None, *axes[outputs]),
            "adapter",
        )
        return {"a": a.astype(self.dtype), "b": (self.scale * b).astype(self.dtype)}


class Adapters(nn.Module):
    """Adapters of the block's kernels; an InputError if `kernels` names an unknown linear."""

    block: nn.Module
    inputs: tuple  # shapes of the block's inputs
    kernels: tuple[str, ...]  # names of the linears that have an adapter; if empty, all have one
    num_nodes: int
    rank: int
    alpha: float  # the product of the factors is scaled by alpha / r
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self) -> Weights:
        """The factors `a` and `b` of each adapted linear."""
        factors = {}
        for path, kernel in _kernels_to_adapt(self.block, self.inputs, self.kernels).items():
            factors[path] = Adapter(
                kernel,
                num_inputs(kernel.value.shape, kernel.fan_in),
                self.num_nodes,
                self.rank,
                self.alpha / self.rank,
                self.dtype,
                name=".".join(path),
            )()
        return unflatten_dict(factors)


def _kernels_to_adapt(
    block: nn.Module, inputs: tuple, names: tuple[str, ...]
) -> dict[LeafPath, Parameter]:
    """The kernels that have an adapter, by the path of their linear."""
    kernels = {
        path[:-1]: leaf
        for path, leaf in block_parameters(block, inputs).items()
        if leaf.takes_adapter
    }
    known = sorted({path[-1] for path in kernels})
    if not known:
        raise InputError(
            "model.adapter_rank makes adapters of the block's linears, and this block has none of "
            "t5x_diffeq's (Linear); set model.adapter_rank=0"
        )
    for name in names:
        if name not in known:
            raise InputError(
                f"model.adapter_kernels names {name!r}; this block has {', '.join(known)}"
            )
    return {path: leaf for path, leaf in kernels.items() if not names or path[-1] in names}


def block_variables(W: Weights) -> dict[str, Weights]:
    """The block's variables at one node: parameters, and adapters if there are any."""
    if ADAPTERS not in W:
        return {"params": W}
    params = {name: leaves for name, leaves in W.items() if name != ADAPTERS}
    return {"params": params, ADAPTERS: W[ADAPTERS]}


def merge(weights: Weights) -> Weights:
    """The weights with each adapter's product added to its kernel in float32, and rounded once."""
    variables = block_variables(weights)
    leaves = flatten_dict(variables["params"])
    factors = flatten_dict(variables.get(ADAPTERS, {}))
    for path in {path[:-1] for path in factors}:
        product = jax.vmap(lambda a, b: jnp.tensordot(a, b, axes=1))
        kernel = leaves[*path, "kernel"]
        added = product(*(factors[*path, name].astype(jnp.float32) for name in ("a", "b")))
        leaves[*path, "kernel"] = (kernel.astype(jnp.float32) + added).astype(kernel.dtype)
    return unflatten_dict(leaves)
