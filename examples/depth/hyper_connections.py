"""Hyper-connections (arXiv 2409.19606): n residual streams, mixed by learned matrices.

    --config.model.scheme='examples.depth.hyper_connections:hyper_connections(streams=4)'

Each sub-field reads h = sum over i of m_i H_i, a mixture of the streams H, and then
H_j <- sum over i of R_ij H_i + b_j dt f(h). At first m picks stream k mod n for sub-field k, R is
the identity and b is 1. These are the paper's static connections. Its streams are summed at the
end; here they are averaged, which the final norm doesn't see. `constrained=True` makes R doubly
stochastic by Sinkhorn's iteration, as in manifold-constrained hyper-connections (arXiv 2512.24880).
"""

import jax
import jax.numpy as jnp
from flax import linen as nn

import t5x_diffeq as td
from t5x_diffeq.model.layers.parameter import declare


def sinkhorn(logits, iterations=20):
    """A matrix near exp(logits) whose rows and columns sum to 1."""

    def normalise(_, logits):
        return jax.nn.log_softmax(jax.nn.log_softmax(logits, axis=0), axis=1)

    return jnp.exp(jax.lax.fori_loop(0, iterations, normalise, logits))


def hyper_connections(streams: int = 4, constrained: bool = False) -> td.Scheme:
    """The scheme with this number of streams."""
    identity = jnp.eye(streams)

    def step(field, W, memory, dt):
        H, k = memory
        for s, sub_field in enumerate((field.f, field.g)):
            learned = {name: x[s] for name, x in W[0]["scheme"].items()}
            R = identity + learned["mix"]
            R = (sinkhorn(8 * R) if constrained else R).astype(H[0].dtype)
            m = (identity[k % streams] + learned["read"]).astype(H[0].dtype)
            b = (1 + learned["write"]).astype(H[0].dtype)
            out = dt * sub_field(W[0], sum(m[i] * h for i, h in enumerate(H)))
            mixed = (sum(R[i, j] * h for i, h in enumerate(H)) for j in range(streams))
            H, k = tuple(h + b[j] * out for j, h in enumerate(mixed)), k + 1
        return H, k

    def leaves(module, config):
        for name, shape in {"read": (2, streams), "write": (2, streams)}.items():
            declare(module, name, nn.initializers.zeros, shape, (None, None), "shift")
        declare(module, "mix", nn.initializers.zeros, (2, streams, streams), (None,) * 3, "shift")

    return td.Scheme(
        step,
        nodes=(1.0,),
        order=None,
        evaluations=(1, 1),
        remembers=f"{streams} residual streams",
        begin=lambda y, num_steps: ((y,) * streams, jnp.zeros((), jnp.int32)),
        end=lambda memory: sum(memory[0]) / streams,
        leaves=leaves,
    )
