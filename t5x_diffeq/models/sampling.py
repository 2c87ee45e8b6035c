"""Generation of text, token by token."""

from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from t5x_diffeq.array_types import Tokens, Weights
from t5x_diffeq.layers.attention_kernels import LANES
from t5x_diffeq.models.language_model import LanguageModel


def sample(
    logits: Float[Array, "B V"], key: Array, temperature: float, top_k: int | None
) -> Int[Array, " B"]:
    """A token from each row: the likeliest at temperature 0, else drawn among the `top_k`."""
    if temperature == 0:
        return logits.argmax(-1)
    if top_k is not None and top_k < logits.shape[-1]:
        threshold = jax.lax.top_k(logits, top_k)[0][:, -1:]
        logits = jnp.where(logits < threshold, -jnp.inf, logits)
    return jax.random.categorical(key, logits / temperature)


def generate(
    model: LanguageModel,
    params: dict,
    prompt: list[int],
    max_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    key: Array,
) -> Iterator[int]:
    """Tokens after `prompt`, as they are made; the caller stops when it has enough.

    The weights of the grid are made once. One compiled step, over a buffer as long as the prompt
    and what may follow.

    Args:
      model: the model.
      params: its parameters.
      prompt: at least one token.
      max_tokens: at most so many; prompt and these fit into the model's length.
      temperature: 0 takes the likeliest token.
      top_k: draw among so many likeliest; None among all.
      key: decides the draw.
    """
    weights = jax.jit(partial(model.apply, method="weights"))({"params": params})

    @partial(jax.jit, donate_argnames="tokens")
    def extend(params: dict, weights: Weights, tokens: Tokens, length: Int[Array, ""]) -> tuple:
        """The buffer with one token more, and that token."""
        y = model.apply({"params": params}, tokens, weights, method="hidden")
        last = jax.lax.dynamic_slice_in_dim(y, length - 1, 1, axis=1)
        logits = model.apply({"params": params}, last, method="logits")[:, 0]
        token = sample(logits, jax.random.fold_in(key, length), temperature, top_k)
        return tokens.at[:, length].set(token), token[0]

    buffer = min(-(-(len(prompt) + max_tokens) // LANES) * LANES, model.config.max_length)
    tokens = jnp.zeros((1, buffer), jnp.int32)
    tokens = tokens.at[0, : len(prompt)].set(jnp.asarray(prompt, jnp.int32))
    for length in range(len(prompt), len(prompt) + max_tokens):
        tokens, token = extend(params, weights, tokens, length)
        yield int(token)
