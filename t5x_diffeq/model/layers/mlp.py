"""The feed-forward sub-field: GELU or ReLU as in GPT, or gated as in Llama and Gemma."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array

from t5x_diffeq.model.layers.array_types import State
from t5x_diffeq.model.layers.linear import Linear

_ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "gelu": partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
}


def activate(
    activation: str, x: Array, up: Array | None = None, prevent_cse: bool = False
) -> Array:
    """a(x), or a(x) * up if `up` is given, in float32; rounded once to the dtype of x.

    In bfloat16, GELU's 1 + tanh(...) has few correct digits where x is negative. As the error is a
    function of x, it doesn't average out over tokens, unlike the other roundings of a pass. The
    backward pass recomputes the activation, so no float32 array is stored for it. Outside of a
    loop, XLA would merge the recomputation with the forward pass and store the array after all;
    `prevent_cse` forbids this.
    """

    @partial(jax.checkpoint, prevent_cse=prevent_cse)
    def in_float32(x: Array, up: Array | None) -> Array:
        activated = _ACTIVATIONS[activation](x.astype(jnp.float32))
        if up is not None:
            activated *= up.astype(jnp.float32)
        return activated.astype(x.dtype)

    return in_float32(x, up)


class MLP(nn.Module):
    """`down(a(up(x)))`, or gated, `down(a(gate(x)) * up(x))` (Shazeer 2020); a: `activation`."""

    embed_dim: int
    mlp_dim: int
    activation: str  # "gelu" (its tanh form), "relu" or "silu"
    gated: bool  # whether the output of `up` is multiplied by a gate
    use_bias: bool
    writes_residual: bool = True
    output_std: float = 0.02
    dtype: DTypeLike = jnp.float32
    fp8: bool = False  # whether the products are computed on fp8 operands
    merge_tokens: bool = True  # whether the products merge batch and length
    unrolled: bool = False  # whether the body of the loop over solver steps has several steps

    @nn.compact
    def __call__(self, x: State) -> State:
        """The MLP's output, not yet scaled by the step size."""
        linear = partial(
            Linear,
            use_bias=self.use_bias,
            dtype=self.dtype,
            fp8=self.fp8,
            merge_tokens=self.merge_tokens,
        )
        widen = partial(linear, (self.embed_dim, self.mlp_dim), ("embed", "mlp"))
        up = checkpoint_name(widen(name="up")(x), "mlp")
        if self.gated:
            gate = checkpoint_name(widen(name="gate")(x), "mlp")
            hidden = activate(self.activation, gate, up, prevent_cse=self.unrolled)
        else:
            hidden = activate(self.activation, up, prevent_cse=self.unrolled)
        hidden = nn.with_logical_constraint(hidden, ("batch", "length", "mlp"))
        output: State = linear(
            (self.mlp_dim, self.embed_dim),
            ("mlp", "embed"),
            init_std=self.output_std,
            writes_residual=self.writes_residual,
            name="down",
        )(hidden)
        # Without a barrier, a step of Llama-1B's ODE on 64 H100s would take 1.03 times as long.
        return jax.lax.optimization_barrier(output) if self.unrolled else output
