"""Attention Residuals (arXiv 2603.15031): a softmax over depth in place of the residual sum.

    --config.model.scheme=examples.depth.attention_residuals:attention_residuals

The values are v_0 = y(0) and what f and g have returned so far. What a sub-field reads is h = sum
over i of a_i v_i with a = softmax over i of q . v_i / rms(v_i), where q is a learned vector, zero
at first. Each sub-field has its own q. A step has the q of its g, and then the q of the next step's
f; so the second q of the last step makes the state that the head reads. This is the paper's form
without blocks.
"""

import jax
import jax.numpy as jnp
from flax import linen as nn

import t5x_diffeq as td
from t5x_diffeq.model.layers.parameter import declare


def attend(q, values):
    """The sum of the values `[B, L, D]`, weighted by the softmax of q . v / rms(v)."""
    rms = [jnp.sqrt(jnp.mean(jnp.square(v), -1) + 1e-6) for v in values]
    scores = [v @ q / r for v, r in zip(values, rms, strict=True)]
    a = jax.nn.softmax(jnp.stack(scores), axis=0)
    return sum(a[i][..., None] * v for i, v in enumerate(values))


def step(field, W, memory, dt):
    """f and g, each of which adds a value."""
    values, h = memory
    q = W[0]["scheme"]["queries"].astype(h.dtype)
    values = (*values, dt * field.f(W[0], h))
    values = (*values, dt * field.g(W[0], attend(q[0], values)))
    return values, attend(q[1], values)


def leaves(module, config):
    """The queries of what follows f and of what follows g."""
    shape, axes = (2, config.embed_dim), (None, "embed")
    declare(module, "queries", nn.initializers.zeros, shape, axes, "shift")


attention_residuals = td.Scheme(
    step,
    nodes=(1.0,),
    order=None,
    evaluations=(1, 1),
    remembers="what all earlier sub-fields have returned",
    begin=lambda y, num_steps: ((y,), y),
    end=lambda memory: memory[1],
    grows=True,
    leaves=leaves,
)
