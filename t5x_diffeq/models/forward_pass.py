"""One pass of the residual stream through a model's field, from t = 0 to t = 1."""

from functools import partial

import jax.numpy as jnp
from jaxtyping import Array

from t5x_diffeq.layers.array_types import Places, State, Vector, Weights
from t5x_diffeq.layers.context import from_zigzag, to_zigzag
from t5x_diffeq.layers.mesh import num_stages
from t5x_diffeq.models.config import ModelConfig
from t5x_diffeq.models.sub_fields import has_cost, vector_field
from t5x_diffeq.ode.integrate import integrate
from t5x_diffeq.ode.running_cost import RunningCosts, StateWithCost, charge_velocity
from t5x_diffeq.ode.stages import can_pipeline, integrate_in_stages


def solve(
    config: ModelConfig,
    weights: Weights,
    y: State,
    places: Places,
    key: Array | None,
    velocity: bool = False,
) -> tuple[State, RunningCosts]:
    """The state at t = 1 from the state at t = 0, and the running costs.

    On a mesh with stages, each takes its own steps, unless there are too few rows for all of them,
    or the steps aren't divisible; then every device takes all steps with its rows.

    Args:
      config: the model's config.
      weights: the weights of the pass, leaves `[nodes, ...]`.
      y: the state at t = 0.
      places: where its tokens stand.
      key: the dropout key; None: no dropout.
      velocity: whether tokens are charged for their velocity.
    """
    c, stages = config, num_stages()
    microbatches = c.pipeline_microbatches or stages
    pipelined = can_pipeline(len(y), c.num_steps, microbatches)
    y, places = to_zigzag(y, places)
    start = _at_no_cost(c, y, velocity)

    def take_steps(weights: Weights, y: Vector, places: Places, key: Array | None) -> Vector:
        of_key = vector_field(c, places)
        return integrate(
            (lambda key: charge_velocity(of_key(key))) if velocity else of_key,
            weights,
            y,
            scheme=c.scheme,
            num_steps=c.num_steps // stages if pipelined else c.num_steps,
            step_size=c.dt,
            remat=c.remat,
            unroll=c.scan_unroll,
            kept_dtype=c.compute_dtype,
            key=key,
        )

    if pipelined:
        take_steps = partial(integrate_in_stages, take_steps, microbatches=microbatches)
    return _split_costs(c, take_steps(weights, start, places, key), velocity)


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
