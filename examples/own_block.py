"""A block of one's own: attention with normalised queries and keys.

    python -m examples.own_block

A block is an ordinary Linen module with two methods, f and g; `docs/extending.md` has the
whole contract. Nothing of it knows of depth: its weights become functions of t because its layers
declare them.
"""

# %%
import jax
import jax.numpy as jnp
from flax import linen as nn

import t5x_diffeq as td
from t5x_diffeq.model.config_layers import mlp_of, norm_of, output_std
from t5x_diffeq.model.layers.linear import Linear
from t5x_diffeq.model.layers.parameter import declare


# %% A parameter says what it is: its role and the logical axis of each of its dimensions.
class HeadNorm(nn.Module):
    """Divides each head by its root mean square, and multiplies it by a learned scale."""

    @nn.compact
    def __call__(self, x):
        """`[B, L, H, G]` to the same."""
        scale = declare(self, "scale", nn.initializers.ones, (x.shape[-1],), (None,), "scale")
        return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6) * scale


class QKNormBlock(td.Block):
    """f is attention with QK-norm (Henry et al. 2020), g the MLP of the config's architecture."""

    def setup(self):  # noqa: D102
        c = self.config
        heads = (c.num_heads, c.head_width)
        self.norm, self.mlp_norm = norm_of(c), norm_of(c)
        self.query, self.key, self.value = (
            Linear((c.embed_dim, *heads), ("embed", "heads", "head_dim"), dtype=c.compute_dtype)
            for _ in range(3)
        )
        self.query_norm, self.key_norm = HeadNorm(), HeadNorm()
        self.output = Linear(
            (*heads, c.embed_dim),
            ("heads", "head_dim", "embed"),
            num_inputs=2,
            init_std=output_std(c),
            writes_residual=True,  # so that fine-tuning and export know where the step size goes
            dtype=c.compute_dtype,
        )
        self.mlp = mlp_of(c)

    def f(self, y, places, deterministic=True):
        """Causal attention, within each document."""
        x = self.norm(y)
        q, k = self.query_norm(self.query(x)), self.key_norm(self.key(x))
        positions, documents = places.positions, places.segments
        seen = positions[:, None, :, None] >= positions[:, None, None, :]
        if documents is not None:
            seen &= documents[:, None, :, None] == documents[:, None, None, :]
        mixed = jax.nn.dot_product_attention(q, k, self.value(x), mask=seen)
        return self.output(mixed).astype(self.config.state_dtype)

    def g(self, y, deterministic=True):
        """The MLP."""
        return self.mlp(self.mlp_norm(y)).astype(self.config.state_dtype)


# %% A config names it as package.module:Name, here this file. As an ODE and as its baseline:
if __name__ == "__main__":
    SIZES = {
        "model.block": "examples.own_block:QKNormBlock",
        "model.num_steps": 3,
        "model.embed_dim": 64,
        "model.mlp_dim": 128,
        "data.tokenizer": "bytes",
        "data.sequence_length": 64,
        "train.total_steps": 20,
        "train.eval_batches": 2,
        "train.eval_all_at_end": False,
    }
    for variant in ("ode", "baseline"):
        config = td.load_config(f"configs/tiny.py:{variant}", SIZES)
        run = td.train(config, f"workdirs/own_block_{variant}")
        print(variant, run.evaluate(eval_batches=2))
