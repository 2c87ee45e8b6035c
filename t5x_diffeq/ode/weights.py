"""The three weight sources: t -> W(t), for any Linen block.

A source reads shapes, logical axes and roles from the block itself. It returns the block's
parameter tree with a leading axis of nodes: the weights of a whole forward pass, made at once
before the solver's loop and never inside it.

    TimeDependentWeights   W(t) = W0 + P e(t)          the paper's hypernetwork
    LayerWeights           one set of weights per node  GPT, Llama; a discretised ODE
    SharedWeights          one set for all times        Zhong et al. 2022; ALBERT

`hyper_init` has the initial scales of the hypernetwork's parameters.
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

from t5x_diffeq.layers.array_types import Times, Weights
from t5x_diffeq.layers.parameter import (
    Parameter,
    declare,
    flatten_parameters,
    is_parameter,
    map_parameters,
)
from t5x_diffeq.ode.contraction import contract, projection_square
from t5x_diffeq.ode.hyper_init import HyperInit
from t5x_diffeq.runtime.errors import InputError

# What W(t) is when e(t) contributes nothing; the roles that a source can generate.
OFFSET = {"kernel": 0.0, "bias": 0.0, "scale": 1.0, "shift": 0.0}

LeafPath = tuple[str, ...]
Embeddings = dict[str, Float[Array, "nodes T"]]  # e(t) by the name of the generated layer


def block_parameters(block: nn.Module, inputs: tuple) -> dict[LeafPath, Parameter]:
    """The block's parameters by path, with shapes in place of arrays; nothing is computed.

    Raises:
      ValueError: if a leaf was not made by `declare`, or no source generates its role.
    """
    variables = jax.eval_shape(block.clone(parent=None, name=None).init, jax.random.key(0), *inputs)
    leaves = flatten_parameters(variables["params"])
    for path, leaf in leaves.items():
        role = leaf.role if is_parameter(leaf) else None
        if role not in OFFSET:
            raise ValueError(
                f"the block's parameter {'/'.join(path)} has role {role!r}; "
                f"a weight source generates {', '.join(OFFSET)} (see layers.parameter.declare)"
            )
        if len(path) < 2:
            raise ValueError(
                f"the block declares {path[0]!r} itself; a layer of the block must declare it"
            )
    return leaves


def _compute_dtype(role: str, dtype: DTypeLike) -> DTypeLike:
    """Kernels and biases are used in the model's dtype, norms in float32."""
    return dtype if role in ("kernel", "bias") else jnp.float32


class GeneratedLayer(nn.Module):
    """The leaves of one linear or norm of the block, as functions of time.

    Attributes:
      leaves: what the linear or norm declares, by name.
      scales: initial scales and step multipliers of its parameters.
      dtype: dtype of the generated kernels and biases.
    """

    leaves: dict[str, Parameter]
    scales: HyperInit
    dtype: DTypeLike

    @nn.compact
    def __call__(
        self, features: Float[Array, "nodes features"], e: Float[Array, "nodes T"] | None
    ) -> tuple[dict[str, Float[Array, "nodes ..."]], Float[Array, "nodes T"]]:
        """Its leaves at each time, and the e(t) that they come from: `e`, or its own if None."""
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
        dtype = _compute_dtype(leaf.role, self.dtype)
        if leaf.role != "kernel":
            return contract(e, P, leaf.names, dtype) + jnp.asarray(OFFSET[leaf.role], dtype)
        shape, zeros = leaf.value.shape, nn.initializers.zeros
        (name_of_W0,) = offset_path((name,))
        W0 = parameter(name_of_W0, zeros, shape, leaf.names, step_multiplier=self.scales.single)
        return contract(e, P, leaf.names, dtype, W0)


class TimeDependentWeights(nn.Module):
    """W(t) = W0 + P e(t) for kernels, P e(t) for biases and shifts, 1 + P e(t) for norm scales.

    Paper, section 4.2 and equation 6.

    Attributes:
      block: the block whose weights are generated.
      inputs: shapes of the block's inputs, for reading its parameters.
      scales: T, the features of time, and the parameters' initial scales and step multipliers.
      attention_width: T of the layers of attention and of its norm; None for that of `scales`.
      shared_embedding: one time embedding for all linears and norms (paper, appendix D.2),
        instead of one each.
      dtype: dtype of the generated kernels and biases.
    """

    block: nn.Module
    inputs: tuple
    scales: HyperInit
    attention_width: int | None = None
    shared_embedding: bool = False
    dtype: DTypeLike = jnp.float32

    def __call__(self, times: Times) -> Weights:
        """The block's parameter tree at `times`: each leaf `[nodes, ...]`."""
        weights, _ = self.with_embeddings(times)
        return weights

    @nn.compact
    def with_embeddings(self, times: Times) -> tuple[Weights, Embeddings]:
        """The weights at `times`, and the e(t) that they come from."""
        features = self.scales.features(times)
        shared = self.scales.embedding()(features) if self.shared_embedding else None
        generated, embeddings = {}, {}
        for path, leaves in self._layers():
            name = layer_name(path)
            layer = GeneratedLayer(leaves, self._scales_of(name), self.dtype, name=name)
            generated[path], embeddings[name] = layer(features, shared)
        return unflatten_dict(generated), embeddings

    def derivative(self, times: Times) -> Weights:
        """dW/dt = P e'(t) at `times`: each leaf `[nodes, ...]`, float32."""
        params = self.variables["params"]

        def rate(name: str) -> Float[Array, "nodes T"]:
            """e'(t), from one product with the time embedding's derivative."""
            of_embedding = (params if self.shared_embedding else params[name])["time_embedding"]
            e = partial(self._embed, of_embedding, self._scales_of(name))
            return jax.jvp(e, (times,), (jnp.ones_like(times),))[1]

        rates = {}
        for path, leaves in self._layers():
            layer = layer_name(path)
            de = rate(layer)
            rates[path] = {
                name: contract(de, params[layer][name], leaf.names, jnp.float32)
                for name, leaf in leaves.items()
            }
        return unflatten_dict(rates)

    def _embed(self, params: dict, scales: HyperInit, times: Times) -> Float[Array, "nodes T"]:
        """e(t) of one layer's time embedding."""
        embedding = scales.embedding(parent=None)
        embed = nn.apply(type(embedding).__call__, embedding)
        return embed({"params": params}, scales.features(times))

    def _scales_of(self, layer: str) -> HyperInit:
        if self.attention_width is None or not of_attention(layer):
            return self.scales
        return replace(self.scales, T=self.attention_width)

    def _layers(self) -> list[tuple[LeafPath, dict[str, Parameter]]]:
        leaves = sorted(block_parameters(self.block, self.inputs).items())
        groups = groupby(leaves, key=lambda item: item[0][:-1])
        layers = [(path, {p[-1]: leaf for p, leaf in group}) for path, group in groups]
        if self.attention_width and not any(of_attention(layer_name(path)) for path, _ in layers):
            raise InputError(
                f"model.attention_time_embed_dim={self.attention_width}: the block has no layer "
                "whose name begins with attention; leave the key out"
            )
        return layers


def layer_name(path: LeafPath) -> str:
    """The name, in the source's parameters, of the block's linear or norm at `path`."""
    return ".".join(path)


def of_attention(layer: str) -> bool:
    """Whether a linear or norm is attention's, by its name in the source's parameters."""
    return layer.startswith("attention")


def offset_path(path: LeafPath) -> LeafPath:
    """The path of the W0 that belongs to the P of a kernel at `path`."""
    return (*path[:-1], f"{path[-1]}_base")


def projection_squares(
    d_weights: Weights, embeddings: Embeddings
) -> dict[LeafPath, Float[Array, ""]]:
    """|dP|^2 of each P, by its path in the parameters of `TimeDependentWeights`.

    They come from small matrices, so that P's gradient needn't be complete before they are used.

    Args:
      d_weights: the gradient of the weights that the source has made.
      embeddings: the e(t) that they come from; empty for sources that have no P.
    """
    squares: dict[LeafPath, Array] = {}
    for path, dW in flatten_dict(d_weights).items() if embeddings else ():
        layer = layer_name(path[:-1])
        squares[layer, path[-1]] = projection_square(embeddings[layer], dW)
    return squares


class LayerWeights(nn.Module):
    """One set of weights per node of the grid, each initialised as the block itself is.

    Attributes:
      block: the block.
      inputs: shapes of the block's inputs.
      num_nodes: number of nodes of the grid.
      dtype: dtype of kernels and biases in use.
    """

    block: nn.Module
    inputs: tuple
    num_nodes: int
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, times: Times) -> Weights:
        """The weights of all nodes; `times` must have one entry per node.

        Raises:
          InputError: if `times` has another length: layer weights have no W(t) off their grid.
        """
        if len(times) != self.num_nodes:
            raise InputError(
                f"per-layer weights exist only at their own {self.num_nodes} nodes, and "
                f"{len(times)} were asked for; time-dependent and shared weights can change grid"
            )
        stacked = self.param("weights", self._init_stacked)
        return _cast_by_role(stacked, block_parameters(self.block, self.inputs), self.dtype)

    def _init_stacked(self, key: jax.Array) -> Weights:
        """`num_nodes` independent initialisations, stacked on a leading axis `steps`."""
        init = jax.vmap(lambda key: _init_block(self.block, self.inputs, key))
        return map_parameters(
            lambda leaf: leaf.replace(names=("steps", *leaf.names)),
            init(jax.random.split(key, self.num_nodes)),
        )


class SharedWeights(nn.Module):
    """One set of weights for all times.

    Attributes:
      block: the block.
      inputs: shapes of the block's inputs.
      dtype: dtype of kernels and biases in use.
    """

    block: nn.Module
    inputs: tuple
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, times: Times) -> Weights:
        """The same weights at each of `times`."""
        weights = self.param("weights", lambda key: _init_block(self.block, self.inputs, key))
        # Repeated before rounding, so that their gradient is summed over the times in float32.
        repeated = jax.tree.map(lambda w: jnp.broadcast_to(w, (len(times), *w.shape)), weights)
        return _cast_by_role(repeated, block_parameters(self.block, self.inputs), self.dtype)


def _init_block(block: nn.Module, inputs: tuple, key: jax.Array) -> Weights:
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), inputs)
    return block.clone(parent=None, name=None).init(key, *zeros)["params"]


def _cast_by_role(
    weights: Weights, declared: dict[LeafPath, Parameter], dtype: DTypeLike
) -> Weights:
    """Each leaf in the dtype in which it is used, so that devices exchange it in that dtype."""
    return unflatten_dict(
        {
            path: leaf.astype(_compute_dtype(declared[path].role, dtype))
            for path, leaf in flatten_dict(weights).items()
        }
    )
