"""A trained model one solver step at a time, by programs that don't depend on the number of steps.

A forward pass as one program is compiled again for every number of steps, which takes seconds: too
slow for a slider. Here the programs are those of one step: its weights at the times that it reads,
and the state after it. Each is compiled once for a scheme and a length of text.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jaxtyping import Array, Float, Int

from t5x_diffeq.inference.sampling import Sampling
from t5x_diffeq.inference.scoring import padded_length
from t5x_diffeq.model.adapters import merge
from t5x_diffeq.model.language_model import LanguageModel, in_one_document, nodes
from t5x_diffeq.model.layers.array_types import Logits, Places, State, Times, Tokens, Weights
from t5x_diffeq.model.ode.integrate import step_function
from t5x_diffeq.model.ode.solvers import VectorField
from t5x_diffeq.model.ode.sources import source_of
from t5x_diffeq.model.sub_fields import vector_field
from t5x_diffeq.training.load import Run

_TOP = 5  # likeliest tokens of a look
_GRIDS_KEPT = 2  # whose weights stay in memory
Depth = tuple[int, str]  # number of solver steps and scheme


class Look(NamedTuple):
    """What the head reads from the states at one node."""

    top: Int[Array, "B L K"]  # the likeliest successors of each token, the likeliest first
    log_p: Float[Array, "B L K"]  # their log probabilities
    loss: Float[Array, "B L"]  # minus the log probability of each target, in nats


@partial(jax.jit, static_argnames="model")
def _start(model: LanguageModel, params: dict, tokens: Tokens, places: Places) -> State:
    return nn.apply(LanguageModel.embed, model)({"params": params}, tokens, places)


@partial(jax.jit, static_argnames="model")
def _weights_at(model: LanguageModel, params: dict, times: Times) -> Weights:
    return nn.apply(lambda it: merge(it.weights(times)), model)({"params": params})


@partial(jax.jit, static_argnames="model")
def _step(
    model: LanguageModel, y: State, W: Weights, places: Places, dt: Float[Array, ""]
) -> State:
    """A step of size dt: one of size 1 of dt times the field, so that dt can be an argument."""
    make_field = vector_field(model.config, places)

    def scaled(key: Array | None) -> VectorField:
        f, g = make_field(key)
        return VectorField(lambda W, y: dt * f(W, y), lambda W, y: dt * g(W, y))

    return step_function(scaled, model.config.scheme, 1.0)(y, (W, None))


@partial(jax.jit, static_argnames="model")
def _logits(model: LanguageModel, params: dict, y: State) -> Logits:
    return nn.apply(lambda it: it.logits(it.normalise(y)), model)({"params": params})


@partial(jax.jit, static_argnames="model")
def _look(model: LanguageModel, params: dict, y: State, targets: Tokens) -> Look:
    log_p = jax.nn.log_softmax(_logits(model, params, y))
    best, top = jax.lax.top_k(log_p, min(_TOP, model.config.vocab_size))
    return Look(top, best, -jnp.take_along_axis(log_p, targets[..., None], -1)[..., 0])


@partial(jax.jit, static_argnames=("model", "sampling"))
def _draw(
    model: LanguageModel,
    sampling: Sampling,
    params: dict,
    y: State,
    last: Int[Array, ""],
    key: Array,
) -> Int[Array, ""]:
    at_last = jax.lax.dynamic_slice_in_dim(y, last, 1, axis=1)
    return sampling(_logits(model, params, at_last)[0], key)[0]


class Stepper:
    """A run's forward pass, step by step, on any grid; per-layer weights have their own alone."""

    def __init__(self, run: Run):
        self.run = run
        self._weights = lru_cache(_GRIDS_KEPT)(self._make_weights)

    def _on(self, grid: Depth) -> tuple[LanguageModel, LanguageModel]:
        """The model on a grid, and the one that is compiled: the same for all numbers of steps."""
        config = self.run.placed.model.config.at_depth(*grid)
        # XLA's attention takes any shape, and nothing is stored for a backward pass.
        plain = replace(config, attention="xla", remat="none")
        compiled = replace(plain, num_steps=self.run.placed.model.config.num_steps)
        return LanguageModel(plain), LanguageModel(compiled)

    def _make_weights(self, grid: Depth) -> list[Weights]:
        """The weights of each step, leaves `[nodes per step, ...]`."""
        model, compiled = self._on(grid)
        times = nodes(model.config).reshape(model.config.num_steps, -1)
        if not source_of(model.config).any_time:
            by_step = nn.apply(LanguageModel.merged_weights_by_step, model)
            return by_step({"params": self.run.params})
        return [_weights_at(compiled, self.run.params, row) for row in times]

    def states(
        self, tokens: Tokens, grid: Depth, places: Places | None = None
    ) -> Iterator[Float[Array, "B L D"]]:
        """The states at t = 0, 1/N, ..., 1, each once it is computed; within `placed.context()`."""
        model, compiled = self._on(grid)
        places = in_one_document(tokens) if places is None else places
        y = _start(compiled, self.run.params, tokens, places)
        yield y
        for W in self._weights(grid):
            y = _step(compiled, y, W, places, model.config.dt)
            yield y

    def last_state(self, tokens: Tokens, grid: Depth, places: Places | None = None) -> State:
        """The state at t = 1; within `placed.context()`."""
        *_, y = self.states(tokens, grid, places)
        return y

    def look(self, y: State, targets: Tokens, grid: Depth) -> Look:
        """What the head reads from a state; within `placed.context()`."""
        return _look(self._on(grid)[1], self.run.params, y, targets)

    def pad(self, tokens: list[int]) -> Int[np.ndarray, "1 L"]:
        """A row of the tokens, with zeros after them up to one of a few lengths."""
        limit = self.run.placed.model.config.max_length
        row = np.zeros((1, padded_length(len(tokens), limit)), np.int32)
        row[0, : len(tokens)] = tokens
        return row

    def draw(self, tokens: list[int], grid: Depth, sampling: Sampling, seed: int) -> Iterator[int]:
        """Yields one token after the other, up to the model's length.

        The tokens are those that `inference.sampling.generate` draws for this prompt alone.
        """
        (key,) = jax.random.split(jax.random.key(seed), 1)
        limit = self.run.placed.model.config.max_length
        while len(tokens) < limit:
            last = len(tokens) - 1
            with self.run.placed.context():
                y = self.last_state(jnp.asarray(self.pad(tokens)), grid)
                place = jax.random.fold_in(key, last)
                token = _draw(
                    self._on(grid)[1], sampling, self.run.params, y, jnp.asarray(last), place
                )
            tokens = [*tokens, int(token)]
            yield tokens[-1]
