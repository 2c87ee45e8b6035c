"""GPT's and Llama's block: attention f and MLP g."""

from functools import partial
from math import prod, sqrt
from typing import Any

import jax
import numpy as np
from flax import linen as nn
from jaxtyping import Array, Bool, Float

from t5x_diffeq.array_types import Cache, Places, State, Weights
from t5x_diffeq.layers.attention import Attention, empty_keys_and_values
from t5x_diffeq.layers.mlp import MLP
from t5x_diffeq.layers.norm import Norm
from t5x_diffeq.models.block import Block, Factors, SubFieldFlops
from t5x_diffeq.ode.weights import block_parameters

_QKV = ("qkv", "query", "key", "value")


class TransformerBlock(Block):
    """f(y) = attention(norm(y)), g(y) = mlp(norm'(y)); GPT's or Llama's layers inside.

    With `config.mlp_input="attention_norm"`, g(y) = mlp(norm'(norm(y))), as in the official Llama.
    The state and both results have `config.state_dtype`; in between, `config.dtype` is used.
    """

    def setup(self):  # noqa: D102
        c = self.config
        gpt = c.architecture == "gpt"
        norm = partial(
            Norm,
            centred=gpt,
            use_shift=gpt or c.norm_shift,
            epsilon=c.norm_eps,
            dtype=c.compute_dtype,
        )
        # N residual additions with step size 1 make the stream grow; those with 1/N do not.
        output_std = 0.02 / sqrt(2 * c.num_steps) if c.step_size == "1" else 0.02
        layer: dict[str, Any] = {
            "use_bias": gpt,
            "output_std": output_std,
            "dtype": c.compute_dtype,
        }
        self.attention_norm = norm()
        self.attention = Attention(
            c.embed_dim,
            c.num_heads,
            c.kv_heads,
            fused=gpt,
            rotary=not gpt,
            kernel=c.attention,
            **layer,
        )
        self.mlp_norm = norm()
        self.mlp = MLP(c.embed_dim, c.mlp_dim, c.mlp_activation, gated=not gpt, **layer)
        self.attention_dropout = nn.Dropout(c.dropout_rate)
        self.mlp_dropout = nn.Dropout(c.dropout_rate)

    def f(self, y: State, places: Places, deterministic: bool = True) -> State:
        """The attention sub-field."""
        output, _ = self.attention(self.attention_norm(y), places)
        dropped = self.attention_dropout(output, deterministic=deterministic)
        return dropped.astype(self.config.state_dtype)

    def g(self, y: State, deterministic: bool = True) -> State:
        """The MLP sub-field."""
        x = self.attention_norm(y) if self.config.mlp_input == "attention_norm" else y
        dropped = self.mlp_dropout(self.mlp(self.mlp_norm(x)), deterministic=deterministic)
        # Without a barrier, the TPU compiler fuses the conversions to and from the state's dtype,
        # and the next norm's sums, into the MLP's products, which then take up to twice as long.
        return jax.lax.optimization_barrier(dropped).astype(self.config.state_dtype)

    @nn.nowrap
    def empty_cache(self, batch_size: int, length: int) -> Cache:
        """Keys and values, `[B, length, K, G]` each."""
        c = self.config
        heads = (c.kv_heads, c.embed_dim // c.num_heads)
        return empty_keys_and_values((batch_size, length, *heads), c.compute_dtype)

    def extend(
        self, y: State, places: Places, real: Bool[Array, "B L"], cache: Cache
    ) -> tuple[State, Cache]:
        """The attention of new tokens to the cached ones and to themselves.

        Padding is cached too, but no real token sees it before a later one has replaced it.
        """
        output, cache = self.attention(self.attention_norm(y), places, cache)
        return output.astype(self.config.state_dtype), cache

    @nn.nowrap
    def flops(self, length: int) -> tuple[SubFieldFlops, SubFieldFlops]:
        """A multiply-add is two FLOPs; causal attention counts half of its square."""
        of = self._kernel_flops()
        f = SubFieldFlops(
            products=sum(flops for (part, _), flops in of.items() if part == "attention"),
            # 2 L D for the scores and as much for the sums of values; half of each is masked.
            mixing=2 * length * self.config.embed_dim,
            last=of["attention", "output"],
            named={
                "qkv": sum(of.get(("attention", n), 0) for n in ("qkv", "query", "key", "value"))
            },
        )
        g = SubFieldFlops(
            products=sum(flops for (part, _), flops in of.items() if part == "mlp"),
            last=of["mlp", "down"],
            named={"mlp": of["mlp", "up"] + of.get(("mlp", "gate"), 0)},
        )
        return f, g

    @nn.nowrap
    def _kernel_flops(self) -> dict[tuple[str, str], float]:
        """FLOPs per token of the product with each kernel, by part and name."""
        leaves = block_parameters(self, self.input_shapes()).items()
        return {
            (path[0], path[1]): 2 * prod(leaf.value.shape)
            for path, leaf in leaves
            if leaf.role == "kernel"
        }

    @nn.nowrap
    def spectral_factors(self, weights: Weights) -> Factors:
        """QK, OV and MLP; see `analysis.spectra`."""
        query, key, value = _split_heads(weights["attention"])
        output = weights["attention"]["output"]["kernel"]
        by_head = "ndhg->nhdg"
        return {
            "qk": (np.einsum(by_head, query), np.einsum("ndhg->nhgd", key)),
            "ov": (np.einsum(by_head, value), np.einsum("nhgd->nhgd", output)),
            "mlp": (weights["mlp"]["up"]["kernel"], weights["mlp"]["down"]["kernel"]),
        }

    def attention_matrix(self, y: State, places: Places) -> Float[Array, "B H L L"]:
        """softmax(q k^T / sqrt(G)), causal."""
        return self.attention.matrix(self.attention_norm(y), places)


def _split_heads(attention: dict) -> tuple[Float[np.ndarray, "nodes D H G"], ...]:
    """W_Q, W_K and W_V by query head, from one fused linear (GPT) or three (Llama)."""
    if "qkv" in attention:
        kernel = attention["qkv"]["kernel"]
        return kernel[:, :, 0], kernel[:, :, 1], kernel[:, :, 2]
    kernels = [attention[name]["kernel"] for name in ("query", "key", "value")]
    count = kernels[0].shape[2]
    return tuple(np.repeat(kernel, count // kernel.shape[2], axis=2) for kernel in kernels)
