"""Gated linear attention in place of softmax attention: a state of fixed size per head.

    --config.model.block=t5x_diffeq.blocks.gated_linear_attention:GatedLinearBlock

Per head, with a decay a in (0, 1) that each token chooses (Yang et al. 2024; with one decay per
head, as in Mamba-2, Dao and Gu 2024):

    S_i = a_i S_(i-1) + k_i v_i^T,   o_i = q_i^T S_i / sqrt(G)

o_i is divided by its root mean square and multiplied by silu(gate) before the output's kernel.

A sequence is read in chunks: within a chunk all tokens are mixed at once, by the products of the
decays between them; between chunks only S is passed on. Generation keeps S [H, G, G] instead of
keys and values, so its memory doesn't grow with the sequence. Documents start from S = 0.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from t5x_diffeq.layers.array_types import Cache, Places, State, Weights
from t5x_diffeq.layers.attention_kernels import HEADS
from t5x_diffeq.layers.linear import Linear
from t5x_diffeq.layers.rotary import BASE
from t5x_diffeq.models.block import Block, Factors, SubFieldFlops, kernel_flops
from t5x_diffeq.models.config_layers import mlp_of, norm_of, output_std
from t5x_diffeq.models.transformer_block import mlp_factors, mlp_flops

_CHUNK = 64  # tokens
_TEMPERATURE = 16.0  # a = sigmoid(x)^(1/16), so that heads begin with a memory of some 25 tokens
_NAMES = ("query", "key", "value", "gate")


class GatedLinearBlock(Block):
    """f is gated linear attention, of as many heads as the config has; g is the config's MLP."""

    scopes = ("gated linear attention", "mlp")
    needs = {  # noqa: RUF012
        "num_kv_heads": None,
        "qk_norm": "none",
        "qkv_bias": False,
        "rope_theta": BASE,
        "rope_scaling": (),
        "norm_position": "before",
        "mlp_input": "state",
    }

    def setup(self):  # noqa: D102
        c = self.config
        width, heads = c.embed_dim, (c.num_heads, c.head_width)
        linear = partial(Linear, dtype=c.compute_dtype)
        self.mixer_norm, self.mlp_norm = norm_of(c), norm_of(c)
        self.query, self.key, self.value, self.gate = (
            linear((width, *heads), ("embed", "heads", "head_dim")) for _ in _NAMES
        )
        self.decay = linear((width, c.num_heads), ("embed", "heads"), use_bias=True)
        self.output = linear(
            (*heads, width),
            ("heads", "head_dim", "embed"),
            num_inputs=2,
            init_std=output_std(c),
            writes_residual=True,
        )
        self.mlp = mlp_of(c)
        self.dropout = nn.Dropout(c.dropout_rate)

    def f(self, y: State, places: Places, deterministic: bool = True) -> State:
        """Gated linear attention of each token to those before it in its document."""
        batch, length, _ = y.shape
        real = jnp.ones((batch, length), bool)
        documents = jnp.zeros((batch, length), jnp.int32)
        if places.segments is not None:
            documents = places.segments
        mixed, _ = self._mix(y, documents, real, _no_memory(self._memory_shape(batch)))
        return self.dropout(mixed, deterministic=deterministic).astype(self.config.state_dtype)

    def g(self, y: State, deterministic: bool = True) -> State:
        """The MLP."""
        output = self.dropout(self.mlp(self.mlp_norm(y)), deterministic=deterministic)
        return jax.lax.optimization_barrier(output).astype(self.config.state_dtype)

    @nn.nowrap
    def empty_cache(self, batch_size: int, length: int) -> Cache:
        """S = 0, `[B, H, G, G]` in float32, whatever the length."""
        return {"memory": _no_memory(self._memory_shape(batch_size))}

    def extend(
        self, y: State, places: Places, real: Bool[Array, "B L"], cache: Cache
    ) -> tuple[State, Cache]:
        """f of new tokens, and S after them."""
        documents = jnp.zeros(real.shape, jnp.int32)
        mixed, memory = self._mix(y, documents, real, cache["memory"])
        return mixed.astype(self.config.state_dtype), {"memory": memory}

    def _mix(
        self,
        y: State,
        documents: Int[Array, "B L"],
        real: Bool[Array, "B L"],
        memory: Float[Array, "B H G G"],
    ) -> tuple[State, Float[Array, "B H G G"]]:
        x = self.mixer_norm(y)
        q, k, v = (checkpoint_name(layer(x), "qkv") for layer in (self.query, self.key, self.value))
        q, k, v = (nn.with_logical_constraint(a, HEADS) for a in (q, k, v))
        log_decay = jax.nn.log_sigmoid(self.decay(x).astype(jnp.float32)) / _TEMPERATURE
        # Padding neither fades the memory nor adds to it.
        tokens = _Tokens(
            q / np.sqrt(q.shape[-1]),
            k * real[..., None, None].astype(k.dtype),
            v,
            jnp.where(real[..., None], log_decay, 0),
            documents,
        )
        mixed, memory = linear_attention(tokens, memory)
        return self.output(self._normalise(mixed) * jax.nn.silu(self.gate(x))), memory

    def _normalise(self, mixed: Float[Array, "B L H G"]) -> Float[Array, "B L H G"]:
        """Each head divided by its root mean square: the sizes of S and of o grow with the text."""
        o = mixed.astype(jnp.float32)
        o *= jax.lax.rsqrt(jnp.square(o).mean(-1, keepdims=True) + self.config.norm_eps)
        return o.astype(mixed.dtype)

    @nn.nowrap
    def _memory_shape(self, batch_size: int) -> tuple[int, int, int, int]:
        c = self.config
        return batch_size, c.num_heads, c.head_width, c.head_width

    @nn.nowrap
    def flops(self, length: int) -> tuple[SubFieldFlops, SubFieldFlops]:
        """Linear in the length: each token meets those of its chunk, and S."""
        c, of_kernels = self.config, kernel_flops(self)
        of_f = {path[0]: flops for path, flops in of_kernels.items() if path[0] != "mlp"}
        # Scores and sums of values within the chunk, half of each masked; reading and updating S.
        mixing = c.num_heads * c.head_width * (2 * min(_CHUNK, length) + 4 * c.head_width)
        named = {"qkv": sum(of_f[name] for name in ("query", "key", "value"))}
        f = SubFieldFlops(sum(of_f.values()), mixing, of_f["output"], named)
        return f, mlp_flops(of_kernels)

    @nn.nowrap
    def spectral_factors(self, weights: Weights) -> Factors:
        """QK and OV of each head, as for attention, and the MLP's product."""
        query, key, value = (weights[name]["kernel"] for name in ("query", "key", "value"))
        return {
            "qk": (query.swapaxes(1, 2), key.transpose(0, 2, 3, 1)),
            "ov": (value.swapaxes(1, 2), weights["output"]["kernel"]),
            **mlp_factors(weights),
        }


class _Tokens(NamedTuple):
    """What the recurrence takes from each token.

    Attributes:
      q: queries, scaled.
      k: keys.
      v: values.
      log_decay: log a, in float32.
      documents: the number of the token's document.
    """

    q: Float[Array, "B L H G"]
    k: Float[Array, "B L H G"]
    v: Float[Array, "B L H G"]
    log_decay: Float[Array, "B L H"]
    documents: Int[Array, "B L"]


def _no_memory(shape: tuple[int, int, int, int]) -> Float[Array, "B H G G"]:
    axes = ("batch", "heads", None, None)
    return nn.with_logical_constraint(jnp.zeros(shape, jnp.float32), axes)


def linear_attention(
    tokens: _Tokens, memory: Float[Array, "B H G G"]
) -> tuple[Float[Array, "B L H G"], Float[Array, "B H G G"]]:
    """o of all tokens, in the values' dtype, and S after the last of them.

    Args:
      tokens: the tokens.
      memory: S before the first of them, of the first one's document.
    """
    batch, length, heads, width = tokens.q.shape
    size = min(_CHUNK, length)
    missing = -length % size

    def by_chunk(x: Array, mode: str) -> Array:
        padding = [(0, 0), (0, missing), *((0, 0),) * (x.ndim - 2)]
        x = jnp.pad(x, padding, mode=mode)
        return x.reshape(batch, -1, size, *x.shape[2:]).swapaxes(0, 1)

    # Padding continues the last document, and neither fades nor fills its memory.
    documents = by_chunk(tokens.documents, "edge")
    chunks = _Tokens(*(by_chunk(x, "constant") for x in tokens))._replace(documents=documents)
    (memory, _), mixed = jax.lax.scan(
        jax.checkpoint(_read_chunk, prevent_cse=False), (memory, tokens.documents[:, 0]), chunks
    )
    mixed = mixed.swapaxes(0, 1).reshape(batch, -1, heads, width)
    return mixed[:, :length], memory


def _read_chunk(
    before: tuple[Float[Array, "B H G G"], Int[Array, " B"]], chunk: _Tokens
) -> tuple[tuple[Float[Array, "B H G G"], Int[Array, " B"]], Float[Array, "B C H G"]]:
    """o of a chunk's tokens, given S and the document that it is of; and both after the chunk."""
    (memory, of), (q, k, v, log_decay, documents) = before, chunk
    total = jnp.cumsum(log_decay, axis=1)  # log of the product of the decays so far
    product = partial(jnp.einsum, preferred_element_type=jnp.float32)
    # Among the chunk's tokens: q_i k_j a_(j+1) ... a_i for j <= i of the same document.
    causal = jnp.tril(jnp.ones((q.shape[1],) * 2, bool))
    seen = (causal & (documents[:, :, None] == documents[:, None]))[..., None]
    decays = jnp.exp(jnp.where(seen, total[:, :, None] - total[:, None], -jnp.inf))
    scores = product("bihg,bjhg->bijh", q, k) * decays
    mixed = product("bijh,bjhg->bihg", scores.astype(v.dtype), v)
    # From the memory, for tokens of its document.
    same = (documents == of[:, None])[..., None]
    mixed += product("bihg,bhge->bihe", q * (same * jnp.exp(total))[..., None], memory)
    # The memory of the last token's document.
    last = documents[:, -1]
    kept = (last == of)[:, None] * jnp.exp(total[:, -1])
    left = (documents == last[:, None])[..., None] * jnp.exp(total[:, -1:] - total)
    added = product("bjhg,bjhe->bhge", k * left[..., None], v)
    return (kept[..., None, None] * memory + added, last), mixed.astype(v.dtype)
