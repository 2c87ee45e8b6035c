"""A mixture of experts in place of the MLP, whose kernels and router are functions of time too.

    --config.model.block="t5x_diffeq.blocks.mixture_of_experts:MixtureBlock(num_experts=8)"

Each token goes to the `experts_per_token` experts that its router scores highest (Shazeer et al.
2017). Experts have no capacity limit, so no token is dropped, and generation with a cache computes
the same as the whole sequence. The running cost keeps the experts balanced (Fedus et al. 2022).

On a mesh the experts lie on `mesh.expert`, an axis that also splits the batch. Each device of this
axis gathers the tokens of all of them (all-gather), applies its own experts, and the results are
summed back to the devices of the tokens (reduce-scatter).
"""

from functools import partial

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from t5x_diffeq.layers.array_types import State, Weights
from t5x_diffeq.layers.linear import Linear
from t5x_diffeq.layers.mesh import mesh_axes, on_shards
from t5x_diffeq.layers.parameter import declare
from t5x_diffeq.models.attention_block import AttentionBlock
from t5x_diffeq.models.block import Factors, SubFieldFlops, kernel_flops
from t5x_diffeq.models.config_layers import norm_of, output_std
from t5x_diffeq.runtime.errors import InputError

_KERNELS = ("gate", "up", "down")  # of each expert


class MixtureBlock(AttentionBlock):
    """The architecture's attention; g is a mixture of SwiGLU experts of width `mlp_dim` each.

    The experts have no biases, whatever the architecture.

    Attributes:
      num_experts: number of experts E.
      experts_per_token: how many of them a token goes to.
      balance: weight of the running cost, averaged over depth, in the training loss.
    """

    num_experts: int = 8
    experts_per_token: int = 2
    balance: float = 0.01

    scopes = ("attention", "experts")
    has_cost = True
    needs = {"norm_position": "before", "mlp_input": "state", "activation": None}  # noqa: RUF012

    def setup(self):  # noqa: D102
        super().setup()
        c = self.config
        if not 1 <= self.experts_per_token <= self.num_experts:
            raise InputError(
                f"model.block={c.block}: experts_per_token={self.experts_per_token} must be from "
                f"1 to num_experts={self.num_experts}"
            )
        self.mlp_norm = norm_of(c)
        self.router = Linear((c.embed_dim, self.num_experts), ("embed", None))
        self.experts = Experts(
            self.num_experts, c.embed_dim, c.mlp_dim, output_std(c), c.compute_dtype
        )
        self.mlp_dropout = nn.Dropout(c.dropout_rate)

    def g(self, y: State, deterministic: bool = True) -> State:
        """The experts of each token, weighted by its router's softmax over them."""
        x = self.mlp_norm(y)
        p = jax.nn.softmax(self.router(x.astype(jnp.float32)), axis=-1)
        shares, chosen = jax.lax.top_k(p, self.experts_per_token)
        self.add_cost(self.balance * imbalance(p, chosen))
        output = self.experts(x, shares / shares.sum(-1, keepdims=True), chosen)
        dropped = self.mlp_dropout(output, deterministic=deterministic)
        return dropped.astype(self.config.state_dtype)

    @nn.nowrap
    def flops(self, length: int) -> tuple[SubFieldFlops, SubFieldFlops]:
        """Attention's; and those of the router and of the experts that a token goes to."""
        of_kernels = kernel_flops(self)
        of = {path: flops for path, flops in of_kernels.items() if path[0] == "experts"}
        share = self.experts_per_token / self.num_experts
        products = of_kernels["router", "kernel"] + share * sum(of.values())
        g = SubFieldFlops(products, last=share * of["experts", "down"])
        return self.attention_flops(length), g

    @nn.nowrap
    def spectral_factors(self, weights: Weights) -> Factors:
        """QK and OV of each head, and W_up W_down of each expert."""
        experts = weights["experts"]
        return {**self.attention_factors(weights), "mlp": (experts["up"], experts["down"])}


def imbalance(p: Float[Array, "B L E"], chosen: Int[Array, "B L k"]) -> Float[Array, ""]:
    """E sum_e f_e p_e: 1 if the tokens are spread evenly, up to E if one expert has them all.

    f_e is the share of the tokens' choices that fell on expert e, and p_e the mean of its
    probability, which has the gradient (Fedus et al. 2022, equation 4).

    Args:
      p: the router's probabilities.
      chosen: the experts of each token.
    """
    f = jax.nn.one_hot(chosen, p.shape[-1]).mean((0, 1, 2))
    return p.shape[-1] * (f * p.mean((0, 1))).sum()


class Experts(nn.Module):
    """SwiGLU MLPs, `down(silu(gate(x)) * up(x))`, of which each token uses its own.

    Attributes:
      num_experts: number of experts E.
      embed_dim: width D of the state.
      mlp_dim: width F of an expert.
      output_std: standard deviation of the down kernels' initialisation.
      dtype: dtype of the computation.
    """

    num_experts: int
    embed_dim: int
    mlp_dim: int
    output_std: float
    dtype: DTypeLike

    @nn.compact
    def __call__(
        self, x: State, shares: Float[Array, "B L k"], chosen: Int[Array, "B L k"]
    ) -> State:
        """The sum over a token's experts of their outputs, weighted by `shares`."""
        shape = (self.num_experts, self.embed_dim, self.mlp_dim)
        axes = ("experts", "embed", "mlp")
        normal = nn.initializers.normal
        kernels = {
            name: declare(self, name, normal(0.02), shape, axes, "kernel", fan_in=self.embed_dim)
            for name in ("gate", "up")
        }
        kernels["down"] = declare(
            self,
            "down",
            normal(self.output_std),
            (self.num_experts, self.mlp_dim, self.embed_dim),
            ("experts", "mlp", "embed"),
            "kernel",
            writes_residual=True,
            fan_in=self.mlp_dim,
        )
        kernels = {name: kernel.astype(self.dtype) for name, kernel in kernels.items()}
        rows, experts, mlp = (mesh_axes(name) for name in ("batch", "experts", "mlp"))
        if set(mlp) & set(rows):
            raise InputError(
                f"mesh.rules: 'mlp' lies on {' x '.join(mlp)}, and batches are split over "
                f"{' x '.join(rows)}; a mixture of experts needs different axes"
            )
        by_token = PartitionSpec(rows or None, mesh_axes("length") or None)
        wide = PartitionSpec(experts or None, None, mlp or None)
        narrow = PartitionSpec(experts or None, mlp or None)
        local = partial(_on_device, rows=rows, experts=experts, mlp=mlp)
        specs = (by_token, by_token, by_token, wide, wide, narrow)
        return on_shards(local, specs, by_token)(
            x, shares.astype(jnp.float32), chosen, *(kernels[name] for name in _KERNELS)
        )


def _on_device(
    x: Float[Array, "b L D"],
    shares: Float[Array, "b L k"],
    chosen: Int[Array, "b L k"],
    *kernels: Float[Array, "E _ _"],
    rows: tuple[str, ...],
    experts: tuple[str, ...],
    mlp: tuple[str, ...],
) -> Float[Array, "b L D"]:
    """One device's part, which has some of the experts and a part of their width.

    Args:
      x: its rows of the state.
      shares: weights of their experts.
      chosen: their experts.
      kernels: its part of each of `_KERNELS`.
      rows: the mesh axes over which rows are split.
      experts: the mesh axes over which experts are split.
      mlp: the mesh axes over which the width of an expert is split.
    """
    exchanged = tuple(axis for axis in experts if axis in rows)
    if exchanged:
        gather = partial(jax.lax.all_gather, axis_name=exchanged, axis=0, tiled=True)
        x, shares, chosen = gather(x), gather(shares), gather(chosen)
    count = len(kernels[0])
    first = jax.lax.axis_index(experts) * count if experts else 0
    y = _apply_experts(x, shares, chosen - first, *kernels)
    summed = tuple(axis for axis in (*experts, *mlp) if axis not in exchanged)
    if summed:
        y = jax.lax.psum(y, summed)
    if exchanged:
        y = jax.lax.psum_scatter(y, exchanged, scatter_dimension=0, tiled=True)
    return y.astype(x.dtype)


def _apply_experts(
    x: Float[Array, "b L D"],
    shares: Float[Array, "b L k"],
    chosen: Int[Array, "b L k"],
    gate: Float[Array, "E D F"],
    up: Float[Array, "E D F"],
    down: Float[Array, "E F D"],
) -> Float[Array, "b L D"]:
    """The sum over those of a token's experts that are numbered 0 to E - 1; float32.

    Tokens are sorted by expert, so that each kernel multiplies a contiguous block of them. On a TPU
    the product skips the others; elsewhere jax 0.10 and 0.12 multiply all tokens by all kernels.
    """
    count, width, k = len(up), x.shape[-1], chosen.shape[-1]
    is_here = (chosen >= 0) & (chosen < count)
    expert = jnp.where(is_here, chosen, count).reshape(-1)  # those of other devices come last
    order = jnp.argsort(expert, stable=True)
    token, sizes = order // k, jnp.bincount(expert, length=count).astype(jnp.int32)
    sorted_x = x.reshape(-1, width)[token]
    product = partial(jax.lax.ragged_dot, group_sizes=sizes, preferred_element_type=jnp.float32)
    gates, ups = (product(sorted_x, kernel).astype(x.dtype) for kernel in (gate, up))
    output = product(jax.nn.silu(gates) * ups, down)
    weight = jnp.where(is_here, shares, 0).reshape(-1)[order]
    weighted = jnp.where(weight[:, None] > 0, weight[:, None] * output, 0)
    return jnp.zeros((x.size // width, width)).at[token].add(weighted).reshape(x.shape)
