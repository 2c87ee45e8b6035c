"""Adaptive integration with diffrax, for evaluation and analysis.

W(t) is made at whatever t the solver asks for. The weights of a model trained on one grid are
meaningful only at its nodes; between them, with the paper's time features (sinusoids of 1000 t),
they are close to noise, and an adaptive solver then takes very many steps.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Int

from t5x_diffeq.model.config import ModelConfig
from t5x_diffeq.model.language_model import LanguageModel, in_one_document, make_source
from t5x_diffeq.model.layers.array_types import Places, State, Tokens, Weights
from t5x_diffeq.model.ode.solvers import find_scheme
from t5x_diffeq.model.ode.sources import source_of
from t5x_diffeq.model.sub_fields import vector_field
from t5x_diffeq.system.errors import InputError
from t5x_diffeq.system.extras import need_package

SOLVERS = {"bosh3": "Bosh3", "tsit5": "Tsit5", "dopri5": "Dopri5", "dopri8": "Dopri8"}


class Adaptive(NamedTuple):
    """An adaptive solver, its tolerances and its step limit."""

    # a key of `SOLVERS`: Bogacki-Shampine (order 3), Tsitouras (5), Dormand-Prince (5, 8)
    solver: str = "tsit5"
    # tolerance per step, relative and absolute, on the root mean square over the state
    rtol: float = 1e-3
    max_steps: int = 512  # number of solver steps after which it gives up


class Solution(NamedTuple):
    """The end of an adaptive integration."""

    y: State  # y(1), before the final norm; meaningless unless t = 1 was reached
    steps: Int[Array, ""]  # the number of solver steps tried: accepted and rejected
    reached: Bool[Array, ""]  # whether t = 1 was reached within `max_steps`


def check_adaptive(config: ModelConfig, adaptive: Adaptive) -> None:
    """Raises an InputError unless the model is an ODE at any t and diffrax is installed."""
    if find_scheme(config.scheme).order is None:
        raise InputError(
            f"{adaptive.solver} solves dy/dt = f + g, and a step of model.scheme={config.scheme} "
            "isn't one of a solver (its order is None); leave --scheme out"
        )
    if not source_of(config).any_time or config.step_size != "1/N":
        raise InputError(
            f"{adaptive.solver} needs W(t) at any t in [0, 1]: weights time_dependent or shared "
            f"with step_size 1/N, not {config.weights} with step_size {config.step_size}"
        )
    need_package("diffrax", adaptive.solver)


def solve_adaptively(
    model: LanguageModel,
    params: dict,
    tokens: Tokens,
    adaptive: Adaptive,
    places: Places | None = None,
) -> Solution:
    """Integrates a batch, whose rows all take the same steps; an InputError as `check_adaptive`.

    The gradient is the gradient of the steps taken (discretise, then optimise), by the online
    recursive checkpointing of Stumm and Walther 2010.
    """
    check_adaptive(model.config, adaptive)
    import diffrax

    places = in_one_document(tokens) if places is None else places
    field = vector_field(model.config, places)(None)
    weights_at = partial(_weights_at, model.config, params["source"])
    y0 = model.apply({"params": params}, tokens, places, method="embed")
    solution = diffrax.diffeqsolve(
        diffrax.ODETerm(lambda t, y, _: field(weights_at(t), y)),
        getattr(diffrax, SOLVERS[adaptive.solver])(),
        t0=0.0,
        t1=1.0,
        dt0=None,
        y0=y0,
        stepsize_controller=diffrax.PIDController(rtol=adaptive.rtol, atol=adaptive.rtol),
        adjoint=diffrax.RecursiveCheckpointAdjoint(),
        max_steps=adaptive.max_steps,
        throw=False,  # `reached` tells the caller whether the solver gave up
    )
    reached = solution.result == diffrax.RESULTS.successful
    return Solution(solution.ys[-1], solution.stats["num_steps"], reached)


def _weights_at(config: ModelConfig, source_params: dict, t: ArrayLike) -> Weights:
    """W(t) at a single time: the source's tree without the time axis."""
    source = make_source(config, parent=None)
    times = jnp.asarray(t, jnp.float32)[None]
    stacked = source.apply({"params": source_params}, times)
    return jax.tree.map(lambda leaf: leaf[0], stacked)
