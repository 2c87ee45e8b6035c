"""A trained model one solver step at a time, by programs that don't depend on the grid.

A forward pass as one program is compiled again for every number of steps and scheme, which takes
seconds: too slow for a slider. Here the programs are the two sub-fields f and g, whose values a
scheme's step adds up, and the weights at one time. The sub-fields are compiled once for a length of
text, and the weights once, unless their source is another function of t on another grid.
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
from t5x_diffeq.model.language_model import LanguageModel, in_one_document, nodes, program_of_source
from t5x_diffeq.model.layers.array_types import Logits, Places, State, Tokens, Weights
from t5x_diffeq.model.ode.solvers import VectorField, find_scheme
from t5x_diffeq.model.ode.sources import source_of
from t5x_diffeq.model.sub_fields import vector_field
from t5x_diffeq.training.load import Run

_TOP = 5  # likeliest tokens of a look
_GRIDS_KEPT = 2  # grids whose weights stay in memory
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
def _weights_at(model: LanguageModel, params: dict, time: Float[Array, ""]) -> Weights:
    W = nn.apply(LanguageModel.weights, model)({"params": params}, time[None])
    return jax.tree.map(lambda leaf: leaf[0], W)


@partial(jax.jit, static_argnames="model")
def _weights_at_nodes(model: LanguageModel, params: dict) -> list[Weights]:
    W = nn.apply(LanguageModel.merged_weights, model)({"params": params})
    count = model.config.num_nodes
    return [jax.tree.map(lambda leaf, n=n: leaf[n], W) for n in range(count)]


@partial(jax.jit, static_argnames=("model", "name"))
def _sub_field(model: LanguageModel, name: str, places: Places, W: Weights, y: State) -> State:
    value: State = getattr(vector_field(model.config, places)(None), name)(W, y)
    return value


@partial(jax.jit, static_argnames="model")
def _logits(model: LanguageModel, params: dict, y: State) -> Logits:
    return nn.apply(lambda bound: bound.logits(bound.normalise(y)), model)({"params": params})


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
    # The keys of `generate`: one for each row, folded with the position of the last token.
    (row_key,) = jax.random.split(key, 1)
    return sampling(_logits(model, params, at_last)[0], jax.random.fold_in(row_key, last))[0]


class Stepper:
    """A run's forward pass, step by step, on any grid; with per-layer weights on theirs alone."""

    def __init__(self, run: Run):
        self.run = run
        self._weights = lru_cache(_GRIDS_KEPT)(self._make_weights)
        self._sources: dict[str, LanguageModel] = {}  # a model for each W(t), by its program
        # XLA's attention takes any shape, and nothing is stored for a backward pass.
        plain = replace(run.placed.model.config, attention="xla", remat="none")
        self.compiled = LanguageModel(plain)  # the same for all grids

    def _model_on(self, grid: Depth) -> LanguageModel:
        return self.run.placed.model.at_depth(*grid)

    def _make_weights(self, grid: Depth) -> list[tuple[Weights, ...]]:
        """The weights at the nodes of each step."""
        model = self._model_on(grid)
        times = nodes(model.config).reshape(model.config.num_steps, -1)
        if not source_of(model.config).any_time:
            by_node = iter(_weights_at_nodes(model, self.run.params))
            return [tuple(next(by_node) for _ in step_times) for step_times in times]
        plain = replace(self.compiled.config, num_steps=grid[0], scheme=grid[1])
        source = self._sources.setdefault(program_of_source(plain), LanguageModel(plain))
        by_time = {
            t: _weights_at(source, self.run.params, jnp.asarray(t)) for t in np.unique(times)
        }
        return [tuple(by_time[t] for t in step_times) for step_times in times]

    def states(
        self, tokens: Tokens, grid: Depth, places: Places | None = None
    ) -> Iterator[Float[Array, "B L D"]]:
        """The states at t = 0, 1/N, ..., 1, each once it is computed; within `placed.context()`."""
        config = self._model_on(grid).config
        scheme = find_scheme(config.scheme)
        places = in_one_document(tokens) if places is None else places
        f, g = (partial(_sub_field, self.compiled, name, places) for name in ("f", "g"))
        y = _start(self.compiled, self.run.params, tokens, places)
        yield y
        memory = scheme.begin(y, config.num_steps)
        for W in self._weights(grid):
            memory = scheme.step(VectorField(f, g), W, memory, config.dt)
            yield scheme.end(memory)

    def last_state(self, tokens: Tokens, grid: Depth, places: Places | None = None) -> State:
        """The state at t = 1; within `placed.context()`."""
        *_, y = self.states(tokens, grid, places)
        return y

    def look(self, y: State, targets: Tokens) -> Look:
        """What the head reads from a state, on the host; within `placed.context()`."""
        look: Look = jax.device_get(_look(self.compiled, self.run.params, y, targets))
        return look

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
        key = jax.random.key(seed)
        limit = self.run.placed.model.config.max_length
        while len(tokens) < limit:
            with self.run.placed.context():
                y = self.last_state(jnp.asarray(self.pad(tokens)), grid)
                last = jnp.asarray(len(tokens) - 1)
                token = _draw(self.compiled, sampling, self.run.params, y, last, key)
            tokens = [*tokens, int(token)]
            yield tokens[-1]
