"""Text generation: the prompts are read at once, then one token per row is drawn at a time."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jaxtyping import Array, Float, Int

from t5x_diffeq.config.keys.values import TEMPERATURES
from t5x_diffeq.data.tokenizer import Tokenizer
from t5x_diffeq.model.language_model import LanguageModel
from t5x_diffeq.model.layers.array_types import Cache, Places, Positions, Tokens, Weights
from t5x_diffeq.system.arguments import checked
from t5x_diffeq.system.errors import InputError

BUCKET = 128  # prompts and caches are padded to multiples of it, so that few programs are compiled


@checked
@dataclass(frozen=True)
class Sampling:
    """How a token is drawn.

    Attributes:
      temperature: temperature of the softmax; 0 takes the likeliest token.
      top_k: draw among this many likeliest tokens; None for all.
      top_p: draw among the likeliest that together have this probability (Holtzman et al. 2020).

    Raises:
      InputError: if one of them is invalid.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0

    def __post_init__(self) -> None:
        lowest, highest = TEMPERATURES
        if self.temperature != 0 and not lowest <= self.temperature <= highest:
            raise InputError(
                f"temperature={self.temperature}; it must be 0 (greedy), or from {lowest:g} to "
                f"{highest:g}"
            )
        if self.top_k is not None and self.top_k < 1:
            raise InputError(f"top_k={self.top_k}; it must be at least 1, or None for all tokens")
        if not 0 < self.top_p <= 1:
            raise InputError(f"top_p={self.top_p}; it must be above 0 and at most 1 (all tokens)")

    def __call__(self, logits: Float[Array, "B V"], key: Array) -> Int[Array, " B"]:
        """A token for each row."""
        if self.temperature == 0:
            return logits.argmax(-1).astype(jnp.int32)
        # The padding of the vocabulary stays at -inf, whatever the compiler makes of the division.
        logits = jnp.where(logits == -jnp.inf, -jnp.inf, logits / self.temperature)
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            lowest = jax.lax.top_k(logits, self.top_k)[0][:, -1:]
            logits = jnp.where(logits < lowest, -jnp.inf, logits)
        if self.top_p < 1:
            descending = jnp.sort(logits, axis=-1, descending=True)
            p = jax.nn.softmax(descending, axis=-1)
            # A token is kept if the probabilities of all likelier tokens sum to less than top_p.
            kept = jnp.cumsum(p, axis=-1) - p < self.top_p
            lowest = jnp.where(kept, descending, jnp.inf).min(-1, keepdims=True)
            logits = jnp.where(logits < lowest, -jnp.inf, logits)
        return jax.random.categorical(key, logits).astype(jnp.int32)


@partial(jax.jit, static_argnames="model")
def make_weights_by_step(model: LanguageModel, params: dict) -> list[Weights]:
    """The weights of each solver step."""
    return nn.apply(LanguageModel.merged_weights_by_step, model)({"params": params})


@partial(jax.jit, static_argnames=("model", "sampling"), donate_argnames="caches")
def extend(
    model: LanguageModel,
    sampling: Sampling,
    params: dict,
    weights: list[Weights],
    tokens: Tokens,
    positions: Positions,
    last: Int[Array, " B"],
    keys: Array,
    caches: list[Cache],
) -> tuple[Int[Array, " B"], list[Cache]]:
    """The token after index `last` of each row of `tokens`, and the caches with these tokens."""
    places, real = Places(positions), jnp.arange(tokens.shape[1]) <= last[:, None]
    variables, read = {"params": params}, nn.apply(LanguageModel.extend, model)
    y, caches = read(variables, tokens, places, real, weights, caches)
    y = jnp.take_along_axis(y, last[:, None, None], axis=1)
    logits = nn.apply(LanguageModel.logits, model)(variables, y)[:, 0]
    # The key follows from the position, so a row is drawn alike alone and beside others.
    reached = jnp.take_along_axis(positions, last[:, None], axis=1)[:, 0]
    step_keys = jax.vmap(jax.random.fold_in)(keys, reached)
    token = jax.vmap(lambda row, key: sampling(row[None], key)[0])(logits, step_keys)
    return nn.with_logical_constraint(token, (None,)), caches


@partial(jax.jit, static_argnums=(0, 1, 2))
def make_caches(model: LanguageModel, batch_size: int, length: int) -> list[Cache]:
    """Empty caches, made on the devices where they stay."""
    return model.empty_caches(batch_size, length)


def generate(
    model: LanguageModel,
    params: dict,
    prompts: list[list[int]],
    max_tokens: int,
    sampling: Sampling,
    key: Array,
) -> Iterator[Int[np.ndarray, " B"]]:
    """Yields the next token of every row, until the caller has enough or `max_tokens` are drawn.

    The weights of the grid are made once, and what f needs of earlier tokens is cached. The
    first token comes from reading the prompts, each later one from one compiled step.

    Args:
      prompts: at least one token each. Their number must be divisible by the mesh's batch shards.
      max_tokens: most tokens to draw. Tokens beyond the model's length are meaningless.
      key: a random key, or one per row; a row with its own key is drawn as it would be alone.
    """
    weights = make_weights_by_step(model, params)
    advance = partial(extend, model, sampling, params, weights)
    keys = key if key.ndim else jax.random.split(key, len(prompts))
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    limit = model.config.max_length
    room = min(-(-(int(lengths.max()) + max_tokens) // BUCKET) * BUCKET, limit)
    padded = min(-(-int(lengths.max()) // BUCKET) * BUCKET, room)
    tokens = np.zeros((len(prompts), padded), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    caches = make_caches(model, len(prompts), room)
    positions = np.broadcast_to(np.arange(padded, dtype=np.int32), tokens.shape)
    token, caches = advance(tokens, positions, lengths - 1, keys, caches)
    for n in range(max_tokens):
        yield np.asarray(token)
        if n + 1 < max_tokens:
            positions, last = (lengths + n)[:, None], np.zeros_like(lengths)
            token, caches = advance(token[:, None], positions, last, keys, caches)


class Continuation:
    """A prompt and what follows it.

    Args:
      stops: non-empty texts, at each of which the continuation ends.
      limit: most tokens to add; None for no limit.

    Attributes:
      ended: whether the continuation is complete.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: list[int],
        stops: Sequence[str] = (),
        limit: int | None = None,
    ):
        self.tokenizer, self.prompt, self.stops, self.limit = tokenizer, prompt, stops, limit
        self.stops_at = tokenizer.stops
        self.tokens: list[int] = []
        self.ended = False

    def add(self, token: int) -> None:
        """Adds a token, which may end the continuation; does nothing if it has ended."""
        if self.ended or token in self.stops_at:
            self.ended = True
            return
        self.tokens.append(token)
        text = self._raw_completion()
        self.ended = len(self.tokens) == self.limit or any(stop in text for stop in self.stops)

    def _raw_completion(self) -> str:
        """The text after the prompt, including the stop that ended it."""
        # With the prompt, because a token's text can depend on the tokens before it.
        text = self.tokenizer.decode(self.prompt + self.tokens)
        return text[len(self.tokenizer.decode(self.prompt)) :]

    def completion(self) -> str:
        """The text after the prompt, up to the first stop."""
        text = self._raw_completion()
        ends = [text.find(stop) for stop in self.stops if stop in text]
        return text[: min(ends, default=len(text))]

    def text(self) -> str:
        """Prompt and continuation."""
        opener = self.tokenizer.opener, self.tokenizer.border.opener
        opened = self.prompt[:1] == [opener[0]] or self.prompt == [opener[1]]
        return self.tokenizer.decode(self.prompt[opened:]) + self.completion()


def grow(rows: Sequence[Continuation], generated: Iterable[np.ndarray]) -> Iterator[None]:
    """Adds generated tokens to the rows, one token each at a time, until all rows have ended.

    Tokens of further rows are ignored.
    """
    for tokens in generated:
        for row, token in zip(rows, tokens.tolist(), strict=False):
            row.add(token)
        yield
        if all(row.ended for row in rows):
            return
