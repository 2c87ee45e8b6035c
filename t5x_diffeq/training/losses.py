"""Next-token cross entropy, in nats per token."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from t5x_diffeq.array_types import Logits, Tokens


def token_losses(logits: Logits, targets: Tokens) -> Float[Array, "B L"]:
    """-log p(target) of each token, float32."""
    logits = logits.astype(jnp.float32)
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - chosen
