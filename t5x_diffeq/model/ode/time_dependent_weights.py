"""W(t) = W0 + P e(t): the paper's hypernetwork, for any Linen block.

`hyper_init` has the initial scales of its parameters; `time_basis` has the functions of time that
e(t) is made of.
"""

from dataclasses import replace
from functools import partial
from itertools import groupby

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from t5x_diffeq.model.layers.array_types import Times, Weights
from t5x_diffeq.model.layers.parameter import Parameter, declare
from t5x_diffeq.model.ode.contraction import contract, projection_square
from t5x_diffeq.model.ode.hyper_init import HyperInit
from t5x_diffeq.model.ode.time_basis import make_time_basis
from t5x_diffeq.model.ode.weight_source import (
    OFFSET,
    Embeddings,
    LeafPath,
    WeightSource,
    block_parameters,
    dtype_in_use,
    is_projection,
    layer_name,
)
from t5x_diffeq.system.errors import InputError


class GeneratedLayer(nn.Module):
    """The leaves of one linear or norm of the block, as functions of time."""

    leaves: dict[str, Parameter]  # what the linear or norm declares, by name
    scales: HyperInit
    dtype: DTypeLike

    @nn.compact
    def __call__(
        self, features: Float[Array, "nodes features"], e: Float[Array, "nodes T"] | None
    ) -> tuple[dict[str, Float[Array, "nodes ..."]], Float[Array, "nodes T"]]:
        """The leaves at each time, and the e(t) that makes them: `e`; if None, the layer's own."""
        e = self.scales.embedding()(features) if e is None else e
        return {name: self._generate(name, leaf, e) for name, leaf in self.leaves.items()}, e

    def _generate(
        self, name: str, leaf: Parameter, e: Float[Array, "nodes T"]
    ) -> Float[Array, "nodes ..."]:
        """`offset + W0 + P e`."""
        parameter = partial(
            declare,
            self,
            role=leaf.role,
            writes_residual=leaf.writes_residual,
            fan_in=leaf.fan_in,
        )
        P = parameter(
            name,
            nn.initializers.normal(self.scales.std(leaf)),
            (self.scales.T, *leaf.value.shape),
            ("time_embed", *leaf.names),
            step_multiplier=self.scales.summed,
        )
        dtype = dtype_in_use(leaf.role, self.dtype)
        if leaf.role != "kernel":
            return contract(e, P, leaf.names, dtype) + jnp.asarray(OFFSET[leaf.role], dtype)
        shape, zeros = leaf.value.shape, nn.initializers.zeros
        (name_of_W0,) = offset_path((name,))
        W0 = parameter(name_of_W0, zeros, shape, leaf.names, step_multiplier=self.scales.single)
        return contract(e, P, leaf.names, dtype, W0)


class TimeDependentWeights(WeightSource):
    """W(t) = W0 + P e(t) for kernels, P e(t) for biases and shifts, 1 + P e(t) for norm scales.

    Paper, section 4.2 and equation 6. Each linear and norm has a time embedding e(t) of its own,
    or all have one (`model.time_embedding=common`; paper, appendix D.2).
    """

    @property
    def scales(self) -> HyperInit:
        """T, the basis, and the parameters' initial scales and step multipliers."""
        c = self.config
        return HyperInit(c.init, c.time_embed_dim, make_time_basis(c))

    def __call__(self, times: Times) -> Weights:
        """The block's parameter tree at `times`: each leaf `[nodes, ...]`."""
        weights, _ = self.with_embeddings(times)
        return weights

    @nn.compact
    def with_embeddings(self, times: Times) -> tuple[Weights, Embeddings]:
        """The weights at `times`, and the e(t) of each layer."""
        features = self.scales.basis(times)
        common = self.scales.embedding()(features) if self._has_common_embedding else None
        generated, embeddings = {}, {}
        for path, leaves in self._layers():
            name = layer_name(path)
            layer = GeneratedLayer(leaves, self._scales_of(name), self.dtype, name=name)
            generated[path], embeddings[name] = layer(features, common)
        return unflatten_dict(generated), embeddings

    def derivative(self, times: Times) -> Weights:
        """dW/dt = P e'(t) at `times`: each leaf `[nodes, ...]`, float32."""
        params = self.variables["params"]

        def rate(name: str) -> Float[Array, "nodes T"]:
            """e'(t), from one product with the time embedding's derivative."""
            owner = params if self._has_common_embedding else params[name]
            scales, variables = self._scales_of(name), {"params": owner["time_embedding"]}
            embed = partial(scales.embedding(parent=None).apply, variables)
            tangent = (jnp.ones_like(times),)
            return jax.jvp(lambda t: embed(scales.basis(t)), (times,), tangent)[1]

        rates = {}
        for path, leaves in self._layers():
            layer = layer_name(path)
            de = rate(layer)
            rates[path] = {
                name: contract(de, params[layer][name], leaf.names, jnp.float32)
                for name, leaf in leaves.items()
            }
        return unflatten_dict(rates)

    @property
    def _has_common_embedding(self) -> bool:
        return self.config.time_embedding == "common"

    def _scales_of(self, layer: str) -> HyperInit:
        width = self.config.attention_time_embed_dim
        if width is None or not is_attention(layer):
            return self.scales
        return replace(self.scales, T=width)

    def _layers(self) -> list[tuple[LeafPath, dict[str, Parameter]]]:
        leaves = sorted(block_parameters(self.block, self.inputs).items())
        groups = groupby(leaves, key=lambda item: item[0][:-1])
        layers = [(path, {p[-1]: leaf for p, leaf in group}) for path, group in groups]
        width = self.config.attention_time_embed_dim
        if width and not any(is_attention(layer_name(path)) for path, _ in layers):
            raise InputError(
                f"model.attention_time_embed_dim={width}: the block has no layer "
                "whose name begins with attention; leave the key out"
            )
        return layers

    # ------------------------------------------------------------------ what it says of itself

    @nn.nowrap
    def is_smooth(self) -> bool:
        """Whether e(t) at the nodes determines e(t) between the nodes, and y(0) is large.

        A small y(0) turns by a large angle in a step, and W(t) then fits the trained grid alone.
        """
        is_smooth = self.scales.basis.is_smooth(self.config.num_steps)
        return is_smooth and self.config.embedding_scale > 1

    @nn.nowrap
    def num_polynomials(self) -> int | None:
        """The number of the basis's functions, if W(t) is a polynomial; else None."""
        basis = self.scales.basis
        return basis.count if basis.polynomial and basis.linear else None

    @nn.nowrap
    def flops(self) -> float:
        """FLOPs of P e(t) for all leaves, and of the time embeddings."""
        products, embeddings = 0, {}
        for path, leaves in self._layers():
            scales = self._scales_of(layer_name(path))
            products += scales.T * sum(leaf.value.size for leaf in leaves.values())
            embeddings[path] = scales.embedding_products
        common = {(): self.scales.embedding_products}
        counted = common if self._has_common_embedding else embeddings
        return 2.0 * self.num_nodes * (products + sum(counted.values()))

    @nn.nowrap
    def describe(self) -> str:
        """The formula of W(t), T, and the T of attention if it has its own."""
        width = self.config.attention_time_embed_dim
        attention = "" if width is None else f", of attention {width}"
        return f"W(t) = W0 + P e(t), T = {self.config.time_embed_dim}{attention}"


def is_attention(layer: str) -> bool:
    """Whether a linear or norm is attention's, by its name in the source's parameters."""
    return layer.startswith("attention")


def offset_path(path: LeafPath) -> LeafPath:
    """The path of the W0 that belongs to the P of a kernel at `path`."""
    return (*path[:-1], f"{path[-1]}_base")


def projection_squares(
    declared: dict[LeafPath, Parameter], d_weights: Weights, embeddings: Embeddings
) -> dict[LeafPath, Float[Array, ""]]:
    """|dP|^2 of each P, by the path of P in `declared`, the source's parameters.

    It is computed from `[nodes, nodes]` matrices, so its user needn't wait for P's gradient.
    """
    squares: dict[LeafPath, Array] = {}
    for path, dW in flatten_dict(d_weights).items():
        layer = layer_name(path[:-1])
        path_of_P = (layer, path[-1])
        if path_of_P in declared and is_projection(declared[path_of_P]):
            squares[path_of_P] = projection_square(embeddings[layer], dW)
    return squares
