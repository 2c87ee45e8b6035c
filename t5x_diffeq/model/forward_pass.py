"""One pass of the residual stream through a model's field, from t = 0 to t = 1."""

from jaxtyping import Array, Float

from t5x_diffeq.model.config import ModelConfig
from t5x_diffeq.model.layers.array_types import Places, State, Weights
from t5x_diffeq.model.layers.context import from_zigzag, to_zigzag
from t5x_diffeq.model.ode.integrate import FieldOfKey, integrate
from t5x_diffeq.model.ode.running_cost import StateWithCost, charge_velocity
from t5x_diffeq.model.sub_fields import vector_field


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

    Args:
      config: the model's config.
      weights: the weights of the pass, leaves `[nodes, ...]`.
      y: the state at t = 0.
      places: where its tokens stand.
      key: the dropout key; None: no dropout.
      velocity: whether tokens are charged for their velocity.
    """
    y, places = to_zigzag(y, places)

    def field(places: Places) -> FieldOfKey:
        of_key = vector_field(config, places)
        return (lambda key: charge_velocity(of_key(key))) if velocity else of_key

    end = integrate(
        field,
        weights,
        StateWithCost.at_start(y) if velocity else y,
        places,
        scheme=config.scheme,
        num_steps=config.num_steps,
        step_size=config.dt,
        remat=config.remat,
        unroll=config.scan_unroll or 1,
        kept_dtype=config.compute_dtype,
        key=key,
    )
    if not velocity:
        return from_zigzag(end), None
    return from_zigzag(end.y), from_zigzag(end.cost) / (config.dt * config.num_steps)
