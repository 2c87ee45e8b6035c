"""One pass of the residual stream through a model's field, from t = 0 to t = 1."""

from functools import partial

from jaxtyping import Array, Float

from t5x_diffeq.layers.array_types import Places, State, Vector, Weights
from t5x_diffeq.layers.context import from_zigzag, to_zigzag
from t5x_diffeq.layers.mesh import num_stages
from t5x_diffeq.models.config import ModelConfig
from t5x_diffeq.models.sub_fields import vector_field
from t5x_diffeq.ode.integrate import integrate
from t5x_diffeq.ode.running_cost import StateWithCost, charge_velocity
from t5x_diffeq.ode.stages import can_pipeline, integrate_in_stages


def solve(
    config: ModelConfig,
    weights: Weights,
    y: State,
    places: Places,
    key: Array | None,
    velocity: bool = False,
) -> tuple[State, Float[Array, "B L"] | None]:
    """The state at t = 1 from the state at t = 0, and the tokens' velocities.

    A token's velocity is the mean over depth and width of F^2; None unless `velocity` asks for it.
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
    if not velocity:
        return from_zigzag(take_steps(weights, y, places, key)), None
    end = take_steps(weights, StateWithCost.at_start(y), places, key)
    return from_zigzag(end.y), from_zigzag(end.cost) / (c.dt * c.num_steps)
