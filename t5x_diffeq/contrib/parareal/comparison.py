"""How well parareal, which is parallel over depth, replaces a model's serial pass."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from t5x_diffeq.contrib.parareal.integration import (
    Parareal,
    iterate,
    parareal,
    steps_in_sequence,
)
from t5x_diffeq.layers.array_types import State, Tokens
from t5x_diffeq.models.config import ModelConfig
from t5x_diffeq.models.language_model import LanguageModel, in_one_document, nodes
from t5x_diffeq.models.sub_fields import has_cost, vector_field
from t5x_diffeq.runtime.errors import InputError

PerIterate = Float[np.ndarray, " iterates"]  # of the coarse pass, then of each iteration


@dataclass(frozen=True)
class Comparison:
    """Parareal beside the serial pass, for each number of iterations from 0 to S.

    Attributes:
      num_steps: N.
      slices: S.
      residuals: the largest relative defect |F(u[s]) - u[s+1]| / |u[s+1]| of the iterate.
      state_errors: |y(1) - serial y(1)| / |serial y(1)|.
      losses: cross entropy in nats per token; the last, of S iterations, is the serial pass's.
      gradient_errors: |gradient - serial gradient| / |serial gradient|, of all parameters.
    """

    num_steps: int
    slices: int
    residuals: PerIterate
    state_errors: PerIterate
    losses: PerIterate
    gradient_errors: PerIterate

    @property
    def serial_loss(self) -> float:
        """The loss of the serial pass."""
        return float(self.losses[-1])

    @property
    def in_sequence(self) -> list[int]:
        """Steps in sequence, by the number of iterations."""
        count = range(self.slices + 1)
        return [steps_in_sequence(self.num_steps, self.slices, n) for n in count]


def best_slices(num_steps: int) -> int:
    """The divisor S > 1 of N with which one iteration has the fewest steps in sequence."""
    divisors = [s for s in range(2, num_steps + 1) if num_steps % s == 0] or [1]
    return min(divisors, key=lambda s: steps_in_sequence(num_steps, s, 1))


def compare_with_serial(
    model: LanguageModel, params: dict, tokens: Tokens, slices: int
) -> Comparison:
    """Parareal's states, losses and gradients beside those of the serial pass, in float32.

    Args:
      model: the model.
      params: its parameters.
      tokens: texts; each token but the first is predicted.
      slices: S.

    Raises:
      InputError: if S doesn't divide N, or the model has no coarse solver.
    """
    config = replace(model.config.in_float32(), attention="xla", remat="none")
    _check(config, slices)
    model = LanguageModel(config)
    measured = jax.jit(partial(_compare, model, slices))(params, tokens)
    return Comparison(config.num_steps, slices, *jax.device_get(measured))


def _check(config: ModelConfig, slices: int) -> None:
    if config.weights == "per_layer":
        raise InputError(
            "parareal needs W(t) on a coarser grid, which per-layer weights don't have; take a run "
            "of time_dependent or shared weights"
        )
    if has_cost(config):
        raise InputError(
            f"parareal integrates no running cost, which model.block={config.block} has; take a "
            "run of another block"
        )
    divisors = [s for s in range(1, config.num_steps + 1) if config.num_steps % s == 0]
    if slices not in divisors:
        raise InputError(
            f"--slices={slices} doesn't divide the {config.num_steps} solver steps; take one of "
            f"{', '.join(map(str, divisors))}"
        )


def solvers_of(
    model: LanguageModel, params: dict, tokens: Tokens, slices: int, axis: str | None = None
) -> Parareal:
    """The fine and the coarse solver of a model, for these tokens.

    Args:
      model: the model.
      params: its parameters.
      tokens: texts, each one document.
      slices: S.
      axis: the mesh axis whose devices share the slices, if any.
    """
    c, coarse = model.config, model.at_depth(slices)
    made = [
        model.apply({"params": params}, jnp.asarray(nodes(each.config)), method="weights")
        for each in (model, coarse)
    ]
    return parareal(
        vector_field(c, in_one_document(tokens)),
        *made,
        scheme=c.scheme,
        num_steps=c.num_steps,
        step_size=c.dt,
        slices=slices,
        axis=axis,
    )


def _compare(model: LanguageModel, slices: int, params: dict, tokens: Tokens) -> tuple:
    """What `Comparison` has besides N and S."""
    read, targets = tokens[:, :-1], tokens[:, 1:]

    def loss(params: dict, y: State) -> Float[Array, ""]:
        def logits(model: LanguageModel, y: State) -> Array:
            return model.logits(model.normalise(y))

        predicted = model.apply({"params": params}, y, method=logits)
        return optax.softmax_cross_entropy_with_integer_labels(predicted, targets).mean()

    def losses(params: dict) -> tuple[Float[Array, " iterates"], tuple[Array, Array]]:
        start: Any = model.apply({"params": params}, read, in_one_document(read), method="embed")
        solvers = solvers_of(model, params, read, slices)
        states, residuals = iterate(solvers, start, slices + 1)
        ends = states[: slices + 1, -1]
        return jax.vmap(partial(loss, params))(ends), (ends, residuals)

    of_all, pull_back, (ends, residuals) = jax.vjp(losses, params, has_aux=True)
    chosen = jnp.eye(slices + 1)
    (serial,) = pull_back(chosen[-1])  # S iterations are the serial pass

    def error(chosen: Array) -> Array:
        (gradient,) = pull_back(chosen)
        apart = jax.tree.map(jnp.subtract, gradient, serial)
        return optax.global_norm(apart) / optax.global_norm(serial)

    size = jnp.linalg.norm(ends[-1])
    state_errors = jnp.stack([jnp.linalg.norm(end - ends[-1]) for end in ends]) / size
    return residuals, state_errors, of_all, jax.lax.map(error, chosen)
