"""Causal multi-head attention, with grouped queries and rotary positions as options."""

from functools import partial

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from t5x_diffeq.model.layers.array_types import Cache, Places, Positions, State
from t5x_diffeq.model.layers.attention_kernels import HEADS, causal_attention
from t5x_diffeq.model.layers.linear import Linear
from t5x_diffeq.model.layers.norm import Norm
from t5x_diffeq.model.layers.rotary import BASE, Scaling, rotate


class Attention(nn.Module):
    """Attention of each token to itself and earlier tokens, of its sequence or of the cache."""

    embed_dim: int
    head_dim: int
    num_heads: int  # query heads H
    num_kv_heads: int  # key and value heads K, a divisor of H
    # whether one linear makes q, k and v, as in GPT (then H = K), or one each, as in Llama
    fused: bool
    use_bias: bool
    qkv_bias: bool
    rotary: bool  # whether q and k are rotated by their position
    # which RMSNorm q and k pass through before they are rotated: "none", "head" (of each head) or
    # "projection" (of all heads together)
    qk_norm: str = "none"
    norm_eps: float = 1e-5
    rope_theta: float = BASE  # see `rotary.rotate`
    rope_scaling: Scaling = ()  # see `rotary.rotate`
    writes_residual: bool = True
    kernel: str = "xla"  # attention kernel, see `attention_kernels.causal_attention`
    output_std: float = 0.02
    dtype: DTypeLike = jnp.float32
    fp8: bool = False  # whether the products with weights are computed on fp8 operands
    merge_tokens: bool = True  # whether these products merge batch and length

    def setup(self):  # noqa: D102
        if self.fused:
            self.qkv = self._project(3, self.num_heads)
        else:
            self.query = self._project(self.num_heads)
            self.key = self._project(self.num_kv_heads)
            self.value = self._project(self.num_kv_heads)
        if self.qk_norm != "none":
            self.query_norm, self.key_norm = self._norm(), self._norm()
        self.output = Linear(
            (self.num_heads, self.head_dim, self.embed_dim),
            ("heads", "head_dim", "embed"),
            num_inputs=2,
            use_bias=self.use_bias,
            init_std=self.output_std,
            writes_residual=self.writes_residual,
            dtype=self.dtype,
            fp8=self.fp8,
            merge_tokens=self.merge_tokens,
        )

    def _norm(self) -> Norm:
        axes = ("head_dim",) if self.qk_norm == "head" else ("heads", "head_dim")
        return Norm(False, False, self.norm_eps, axes, dtype=self.dtype)

    def _project(self, *heads: int) -> Linear:
        """The linear from the state to heads; a kernel `[D, 3, H, G]` makes q, k and v at once."""
        return Linear(
            (self.embed_dim, *heads, self.head_dim),
            ("embed", *("maps",) * (len(heads) - 1), "heads", "head_dim"),
            use_bias=self.qkv_bias,
            dtype=self.dtype,
            fp8=self.fp8,
            merge_tokens=self.merge_tokens,
        )

    def __call__(self, x: State, places: Places, cache: Cache | None = None) -> tuple[State, Cache]:
        """The attention output, not yet scaled by the step size; and the cache with the new tokens.

        Args:
          cache: keys and values of earlier tokens, `[B, length, K, G]`; None: attend to `x` alone,
            and return {} as the cache.
        """
        q, k, v = self._heads(x, places.positions)
        if cache is None:
            mixed = causal_attention(q, k, v, self.kernel, places.segments, places.order)
            return self.output(mixed), {}
        cache = _write(cache, k, v, places.positions)
        return self.output(_attend_to_cache(q, cache, places.positions)), cache

    def matrix(self, x: State, places: Places) -> Float[Array, "B H L L"]:
        """softmax(q k^T / sqrt(G)), causal, of sequences that are one document each."""
        q, k, _ = self._heads(x, places.positions)
        k = jnp.repeat(k, q.shape[2] // k.shape[2], axis=2)
        scores = jnp.einsum("blhg,bmhg->bhlm", q, k) / q.shape[-1] ** 0.5
        causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
        return jax.nn.softmax(jnp.where(causal, scores, -jnp.inf))

    def _heads(self, x: State, positions: Positions) -> tuple[Float[Array, "B L _ G"], ...]:
        if self.fused:
            qkv = self.qkv(x)
            q, k, v = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
        else:
            q, k, v = self.query(x), self.key(x), self.value(x)
        # The name precedes the rotation, which makes q float32: storing that would take twice the
        # memory.
        q, k, v = (checkpoint_name(a, "qkv") for a in (q, k, v))
        if self.qk_norm != "none":
            q, k = self.query_norm(q), self.key_norm(k)
        if self.rotary:
            rotate_heads = partial(
                rotate,
                positions=positions,
                base=self.rope_theta,
                scaling=self.rope_scaling,
                swap_by_product=self.kernel.startswith("splash"),  # which runs on TPUs
            )
            # q stays in float32 until the kernel has scaled it, so that it is rounded once.
            q, k = rotate_heads(q, dtype=jnp.float32), rotate_heads(k)
        return tuple(nn.with_logical_constraint(a, HEADS) for a in (q, k, v))


def empty_keys_and_values(shape: tuple[int, int, int, int], dtype: DTypeLike) -> Cache:
    """A cache without tokens, of shape `[B, length, K, G]`, split as the heads are."""
    return {
        name: nn.with_logical_constraint(jnp.zeros(shape, dtype), HEADS)
        for name in ("keys", "values")
    }


def _write(
    cache: Cache, k: Float[Array, "B L K G"], v: Float[Array, "B L K G"], positions: Positions
) -> Cache:
    """The cache with k and v written at their positions."""
    rows = jnp.arange(len(k))[:, None]
    new = {"keys": k, "values": v}
    return {name: cache[name].at[rows, positions].set(new[name]) for name in new}


def _attend_to_cache(
    q: Float[Array, "B L H G"], cache: Cache, positions: Positions
) -> Float[Array, "B L H G"]:
    """Attention over the cached tokens up to each token, itself included."""
    keys, values = cache["keys"], cache["values"]
    seen = jnp.arange(keys.shape[1]) <= positions[:, None, :, None]
    return jax.nn.dot_product_attention(q.astype(keys.dtype), keys, values, mask=seen)
