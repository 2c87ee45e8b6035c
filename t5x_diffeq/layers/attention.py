"""Causal multi-head attention, with grouped queries and rotary positions as options."""

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from t5x_diffeq.array_types import Places, Positions, State
from t5x_diffeq.layers.attention_kernels import HEADS, causal_attention
from t5x_diffeq.layers.linear import Linear
from t5x_diffeq.layers.norm import Norm
from t5x_diffeq.layers.rotary import BASE, Scaling, rotate

CACHE = "cache"  # the collection that holds the keys and values of earlier tokens


class Attention(nn.Module):
    """Attention of each token to itself and the tokens before it, in its sequence or in the cache.

    Attributes:
      embed_dim: width D of the state.
      head_dim: width G of a head.
      num_heads: query heads H.
      num_kv_heads: key and value heads K, a divisor of H.
      fused: whether one linear makes q, k and v, as in GPT (then H = K), or one each, as in Llama.
      use_bias: whether the output has a bias.
      qkv_bias: whether q, k and v have biases.
      qk_norm: which RMSNorm q and k pass through before they are rotated: "none", "head" (of each
        head) or "projection" (of all heads together).
      norm_eps: epsilon of these norms.
      rotary: whether q and k are rotated by their position.
      rotary_base: see `rotary.rotate`.
      rotary_scaling: see `rotary.rotate`.
      writes_residual: whether the result is added to the residual stream.
      kernel: attention kernel, see `attention_kernels.causal_attention`.
      output_std: standard deviation of the output kernel's initialisation.
      dtype: dtype of the computation.
    """

    embed_dim: int
    head_dim: int
    num_heads: int
    num_kv_heads: int
    fused: bool
    use_bias: bool
    qkv_bias: bool
    rotary: bool
    qk_norm: str = "none"
    norm_eps: float = 1e-5
    rotary_base: float = BASE
    rotary_scaling: Scaling = ()
    writes_residual: bool = True
    kernel: str = "xla"
    output_std: float = 0.02
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: State, places: Places) -> State:
        """The attention output, not yet scaled by the step size."""
        q, k, v = self._fused_qkv(x) if self.fused else self._separate_qkv(x)
        q, k, v = (checkpoint_name(a, "qkv") for a in (q, k, v))
        if self.qk_norm != "none":
            q, k = self._norm("query_norm")(q), self._norm("key_norm")(k)
        if self.rotary:
            rotation = (places.positions, self.rotary_base, self.rotary_scaling)
            # q stays in float32 until the kernel has scaled it, so that it is rounded once.
            q, k = rotate(q.astype(jnp.float32), *rotation), rotate(k, *rotation)
        q, k, v = (nn.with_logical_constraint(a, HEADS) for a in (q, k, v))
        if self.has_variable(CACHE, "keys"):
            mixed = self._attend_to_cache(q, k, v, places.positions)
        else:
            mixed = causal_attention(q, k, v, self.kernel, places.segments)
        return Linear(
            (self.num_heads, self.head_dim, self.embed_dim),
            ("heads", "head_dim", "embed"),
            num_inputs=2,
            use_bias=self.use_bias,
            init_std=self.output_std,
            writes_residual=self.writes_residual,
            dtype=self.dtype,
            name="output",
        )(mixed)

    def _attend_to_cache(
        self,
        q: Float[Array, "B L H G"],
        k: Float[Array, "B L K G"],
        v: Float[Array, "B L K G"],
        positions: Positions,
    ) -> Float[Array, "B L H G"]:
        """Attention over the cached tokens up to each token, itself included.

        The cache's `keys` and `values` are `[slots, B, length, K, G]`. This attention uses one
        `slot` and writes k and v at their positions there, in place.
        """
        slot: int = self.get_variable(CACHE, "slot")
        rows = jnp.arange(len(q))[:, None]

        def own(name: str, new: Float[Array, "B L K G"]) -> Float[Array, "B length K G"]:
            cached: Array = self.get_variable(CACHE, name)
            cached = cached.at[slot, rows, positions].set(new)
            self.put_variable(CACHE, name, cached)
            return cached[slot]

        keys, values = own("keys", k), own("values", v)
        seen = jnp.arange(keys.shape[1]) <= positions[:, None, :, None]
        return jax.nn.dot_product_attention(q.astype(k.dtype), keys, values, mask=seen)

    def _norm(self, name: str) -> Norm:
        axes = ("head_dim",) if self.qk_norm == "head" else ("heads", "head_dim")
        return Norm(False, False, self.norm_eps, axes, dtype=self.dtype, name=name)

    def _fused_qkv(self, x: State) -> tuple[Float[Array, "B L H G"], ...]:
        """q, k and v from one kernel `[D, 3, H, G]`."""
        qkv = Linear(
            (self.embed_dim, 3, self.num_heads, self.head_dim),
            ("embed", None, "heads", "head_dim"),
            use_bias=self.qkv_bias,
            dtype=self.dtype,
            name="qkv",
        )(x)
        return qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]

    def _separate_qkv(self, x: State) -> tuple[Float[Array, "B L _ G"], ...]:
        """q, k and v from a kernel `[D, H or K, G]` each."""

        def project(name: str, heads: int) -> Float[Array, "B L _ G"]:
            return Linear(
                (self.embed_dim, heads, self.head_dim),
                ("embed", "heads", "head_dim"),
                use_bias=self.qkv_bias,
                dtype=self.dtype,
                name=name,
            )(x)

        return (
            project("query", self.num_heads),
            project("key", self.num_kv_heads),
            project("value", self.num_kv_heads),
        )
