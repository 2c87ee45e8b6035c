"""One pass of the residual stream through a model's field, from t = 0 to t = 1."""

import jax.numpy as jnp
from jaxtyping import Array

from t5x_diffeq.layers.array_types import Places, State, Vector, Weights
from t5x_diffeq.layers.context import from_zigzag, to_zigzag
from t5x_diffeq.models.config import ModelConfig
from t5x_diffeq.models.sub_fields import has_cost, vector_field
from t5x_diffeq.ode.integrate import integrate
from t5x_diffeq.ode.running_cost import RunningCosts, StateWithCost, charge_velocity


def solve(
    config: ModelConfig,
    weights: Weights,
    y: State,
    places: Places,
    key: Array | None,
    velocity: bool = False,
) -> tuple[State, RunningCosts]:
    """The state at t = 1 from the state at t = 0, and the running costs.

    Args:
      config: the model's config.
      weights: the weights of the pass, leaves `[nodes, ...]`.
      y: the state at t = 0.
      places: where its tokens stand.
      key: the dropout key; None: no dropout.
      velocity: whether tokens are charged for their velocity.
    """
    y, places = to_zigzag(y, places)
    of_key = vector_field(config, places)
    end = integrate(
        (lambda key: charge_velocity(of_key(key))) if velocity else of_key,
        weights,
        _at_no_cost(config, y, velocity),
        scheme=config.scheme,
        num_steps=config.num_steps,
        step_size=config.dt,
        remat=config.remat,
        unroll=config.scan_unroll,
        kept_dtype=config.compute_dtype,
        key=key,
    )
    return _split_costs(config, end, velocity)


def _at_no_cost(config: ModelConfig, y: State, velocity: bool) -> Vector:
    """The state at t = 0, and beside it what is charged by the block and, outside, for velocity."""
    start: Vector = StateWithCost.at_start(y) if has_cost(config) else y
    return StateWithCost.at_start(start, y.shape[:2]) if velocity else start


def _split_costs(config: ModelConfig, end: Vector, velocity: bool) -> tuple[State, RunningCosts]:
    """The state at t = 1, and the means over depth of what was charged."""
    time, of_block, of_tokens = config.dt * config.num_steps, jnp.zeros(()), None
    if velocity:
        end, of_tokens = end.y, from_zigzag(end.cost) / time
    if has_cost(config):
        end, of_block = end.y, end.cost / time
    return from_zigzag(end), RunningCosts(of_block, of_tokens)
