"""Generation of text: the prompts are read at once, then a token of each row at a time."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from t5x_diffeq.array_types import Cache, Places, Tokens, Weights
from t5x_diffeq.models.block import empty_cache
from t5x_diffeq.models.language_model import LanguageModel

BUCKET = 128  # prompts and caches are padded to multiples of it, so that few programs are compiled


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn.

    Attributes:
      temperature: of the softmax; 0 takes the likeliest token.
      top_k: among so many likeliest; None: all.
      top_p: among the likeliest that together have this probability (Holtzman et al. 2020).
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0

    def __call__(self, logits: Float[Array, "B V"], key: Array) -> Int[Array, " B"]:
        """A token for each row."""
        if self.temperature == 0:
            return logits.argmax(-1).astype(jnp.int32)
        logits = logits / self.temperature
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            lowest = jax.lax.top_k(logits, self.top_k)[0][:, -1:]
            logits = jnp.where(logits < lowest, -jnp.inf, logits)
        if self.top_p < 1:
            descending = jnp.sort(logits, axis=-1, descending=True)
            p = jax.nn.softmax(descending, axis=-1)
            kept = jnp.cumsum(p, axis=-1) - p < self.top_p  # those before leave room for it
            lowest = jnp.where(kept, descending, jnp.inf).min(-1, keepdims=True)
            logits = jnp.where(logits < lowest, -jnp.inf, logits)
        return jax.random.categorical(key, logits).astype(jnp.int32)


def generate(
    model: LanguageModel,
    params: dict,
    prompts: list[list[int]],
    max_tokens: int,
    sampling: Sampling,
    key: Array,
) -> Iterator[Int[np.ndarray, " B"]]:
    """The next token of every row, again and again; the caller stops when it has enough.

    The weights of the grid are made once, and keys and values of all tokens read are kept. The
    first token comes with the prompts, each later one from one compiled step.

    Args:
      model: the model.
      params: its parameters.
      prompts: at least one token each.
      max_tokens: at most so many; prompts and these fit into the model's length.
      sampling: how tokens are drawn.
      key: decides the draw.
    """
    weights = jax.jit(partial(model.apply, method="merged_weights"))({"params": params})

    @partial(jax.jit, donate_argnames="cache")
    def extend(
        params: dict, weights: Weights, tokens: Tokens, places: Places, last: Array, cache: Cache
    ) -> tuple[Int[Array, " B"], Cache]:
        """The token after position `last` of `tokens` in each row, and the cache with these."""
        y, cache = model.apply({"params": params}, tokens, places, weights, cache, method="extend")
        y = jnp.take_along_axis(y, last[:, None, None], axis=1)
        logits = model.apply({"params": params}, y, method="logits")[:, 0]
        drawn = jax.random.fold_in(key, places.positions.max())
        return sampling(logits, drawn), cache

    lengths = np.array([len(prompt) for prompt in prompts])
    limit = model.config.max_length
    room = min(-(-(int(lengths.max()) + max_tokens) // BUCKET) * BUCKET, limit)
    padded = min(-(-int(lengths.max()) // BUCKET) * BUCKET, room)
    tokens = np.zeros((len(prompts), padded), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    cache = empty_cache(model.config, len(prompts), room)
    places = Places(jnp.broadcast_to(jnp.arange(padded), tokens.shape))
    last = jnp.asarray(lengths - 1)
    token, cache = extend(params, weights, jnp.asarray(tokens), places, last, cache)
    for n in range(max_tokens):
        yield np.asarray(token)
        if n + 1 < max_tokens:
            places, last = Places(jnp.asarray(lengths + n)[:, None]), jnp.zeros_like(last)
            token, cache = extend(params, weights, token[:, None], places, last, cache)
