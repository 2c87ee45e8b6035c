"""Checks of a scheme of another package: what a step takes and returns, counts, and learns."""

from dataclasses import replace
from functools import partial
from math import log2
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict
from jaxtyping import Array

from t5x_diffeq.model.config import ModelConfig
from t5x_diffeq.model.layers.array_types import State, Tree
from t5x_diffeq.model.layers.parameter import map_parameters
from t5x_diffeq.model.ode import solvers
from t5x_diffeq.model.ode.integrate import integrate
from t5x_diffeq.model.ode.solvers import Scheme, VectorField
from t5x_diffeq.model.ode.weight_source import dtype_in_use, layer_name
from t5x_diffeq.model.sub_fields import SchemeLeaves
from t5x_diffeq.system.errors import InputError, describe_foreign

_LENGTH, _WIDTH = 3, 4
_ROUNDING = 1e-5  # an error this small says nothing of the order
_LAYERS = {"parallel": "euler", "sequential": "lie_trotter"}  # the schemes of these layers


def check_scheme(config: ModelConfig) -> None:
    """Checks the scheme that `model.scheme` names, with sub-fields that don't mix tokens.

    Raises:
      InputError: if a step can't be taken, or evaluates f or g another number of times than the
        scheme says; if it changes the shape or dtype of the state or of the memory; if it says an
        order, and changes the state where f and g are zero, or has a lower order; if it returns a
        state that isn't finite, or mixes tokens; if it isn't a step of the `layer` that the scheme
        says; if the scheme lacks an `end`; or if a leaf has no gradient.
    """
    small = replace(config, block=None, embed_dim=_WIDTH, num_heads=1, num_kv_heads=None)
    scheme, N = solvers.find_scheme(config.scheme), config.num_steps
    try:
        W = leaves_of(small)
        y = jax.random.normal(jax.random.key(1), (1, _LENGTH, _WIDTH))
        counted = solvers.count_evaluations(scheme, W, y)
        _check_memory(small, scheme)
        if not hasattr(jax.eval_shape(lambda y: scheme.end(scheme.begin(y, N)), y), "shape"):
            raise _refused(
                config, "ends with a memory; give it end(memory), which returns its state"
            )
        solve = partial(_integrate, small, config.scheme)
        end, pull_back = jax.vjp(solve, W, y)
        state = jax.ShapeDtypeStruct(y.shape, jnp.dtype(config.state_dtype))
        returned = jax.eval_shape(solve, W, state)
    except InputError:
        raise
    except Exception as error:  # another package's code may raise anything
        raise _refused(config, f"can't take {N} steps: {describe_foreign(error)}") from error
    if counted != tuple(scheme.evaluations):
        raise _refused(
            config,
            f"says that a step evaluates f and g {scheme.evaluations} times, and it does so "
            f"{counted} times; correct its evaluations",
        )
    if (returned.shape, returned.dtype) != (state.shape, state.dtype):
        raise _refused(
            config,
            f"returns {returned.dtype}{list(returned.shape)} for a state "
            f"{state.dtype}{list(state.shape)}",
        )
    if not np.isfinite(end).all():
        raise _refused(config, "returns a state that isn't finite")
    d_leaves, dy = pull_back(jnp.zeros_like(y).at[:, 1].set(1.0))
    if np.any(np.asarray(dy)[:, [0, 2]]):
        raise _refused(config, "mixes tokens; only f may do that")
    if scheme.order is not None and not np.allclose(_integrate_zero(small, scheme, W, y), y):
        raise _refused(
            config,
            "changes the state where f and g are zero, so it doesn't solve dy/dt = f + g; a step "
            "is y + dt * (...), or the scheme's order is None",
        )
    _check_order(small, scheme, y)
    for path, gradient in flatten_dict(d_leaves).items():
        if not np.any(np.asarray(gradient)):
            raise _refused(
                config, f"declares {layer_name(path)}, which its steps don't read: no gradient"
            )
    if scheme.layer is not None:
        expected = _integrate(small, _LAYERS[scheme.layer], W, y)
        if scheme.leaves is not None or not np.allclose(end, expected, rtol=1e-5, atol=1e-6):
            raise _refused(
                config,
                f"says layer={scheme.layer!r}, and its steps aren't those of "
                f"{_LAYERS[scheme.layer]}; leave layer out",
            )


def _check_order(config: ModelConfig, scheme: Scheme, y: State) -> None:
    """Checks that halving the step divides the error by 2^order, nearly, with constant weights."""
    if scheme.order is None or scheme.leaves is not None or not scheme.any_grid:
        return

    def solve(name: str, num_steps: int) -> State:
        return _integrate(replace(config, num_steps=num_steps, step_size="1/N"), name, {}, y)

    exact = solve("rk4", 64)
    try:
        coarse, fine = (float(abs(solve(config.scheme, n) - exact).max()) for n in (8, 16))
    except Exception as error:  # another package's code may raise anything
        raise _refused(
            config,
            f"can't take 8 or 16 steps: {describe_foreign(error)}; if it exists on the config's "
            "grid alone, say any_grid=False",
        ) from error
    if fine > _ROUNDING and coarse < 2 ** (scheme.order - 1 / 2) * fine:
        order = max(0, round(log2(max(coarse, _ROUNDING) / fine)))
        raise _refused(
            config,
            f"says order={scheme.order}, and with 16 steps its error is {fine:.1e}, with 8 steps "
            f"{coarse:.1e}: that is order {order}; correct it, or its step",
        )


def _check_memory(config: ModelConfig, scheme: Scheme) -> None:
    """Checks that a step returns a memory of the shapes and dtypes that it takes, as in a run.

    A memory that grows has no shape to keep.
    """
    if scheme.grows:
        return
    field, N = VectorField(lambda W, y: y, lambda W, y: y), config.num_steps
    W: Tree = {}
    if scheme.leaves is not None:
        declared = jax.eval_shape(SchemeLeaves(config, parent=None).init, jax.random.key(0))

        def in_use(leaf: Any) -> jax.ShapeDtypeStruct:
            dtype = dtype_in_use(leaf.role, config.compute_dtype)
            return jax.ShapeDtypeStruct(leaf.value.shape, dtype)

        W = {"scheme": map_parameters(in_use, declared["params"])}
    y = jax.ShapeDtypeStruct((1, _LENGTH, _WIDTH), jnp.dtype(config.state_dtype))
    before = jax.eval_shape(lambda y: scheme.begin(y, N), y)

    def step(W: Tree, memory: Any) -> Any:
        return scheme.step(field, (W,) * len(scheme.nodes), memory, config.dt)

    after = jax.eval_shape(step, W, before)
    taken, returned = _shapes(before), _shapes(after)
    if taken != returned:
        advice = "return what it takes, or say grows=True"
        if jax.tree.map(jnp.shape, before) == jax.tree.map(jnp.shape, after):
            advice = "leaves of the roles scale and shift are float32: use leaf.astype(y.dtype)"
        raise _refused(
            config,
            f"takes {taken} in a step and returns {returned}; {advice}",
        )


def _shapes(memory: Any) -> str:
    """A memory as its dtypes and shapes."""
    named = jax.tree.map(lambda x: _Verbatim(f"{x.dtype}{list(x.shape)}"), memory)
    return repr(named)


class _Verbatim(str):
    """A text whose representation is itself."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def leaves_of(config: ModelConfig) -> Tree:
    """The scheme's leaves as the tree W, plus noise: a leaf may do nothing at its initial value."""
    if solvers.find_scheme(config.scheme).leaves is None:
        return {}
    declared = SchemeLeaves(config, parent=None).init(jax.random.key(0))["params"]

    def with_noise(leaf: Any) -> Array:
        noise = jax.random.normal(jax.random.key(leaf.value.size), leaf.value.shape)
        return leaf.value + 0.1 * noise

    return {"scheme": map_parameters(with_noise, declared)}


def _integrate(config: ModelConfig, scheme: str, W: Tree, y: State) -> State:
    """y(1) of f = tanh(y) and g = sin(2 y)."""
    field = VectorField(lambda W, y: jnp.tanh(y), lambda W, y: jnp.sin(2 * y))
    nodes = config.num_steps * len(solvers.find_scheme(scheme).nodes)
    # The scan over steps needs an array, also for a scheme without leaves.
    W = {**W, "block": jnp.zeros(())}
    stacked = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (nodes, *leaf.shape)), W)
    end: State = integrate(
        lambda args: lambda key: field,
        stacked,
        y,
        scheme=scheme,
        num_steps=config.num_steps,
        step_size=config.dt,
    )
    return end


def _integrate_zero(config: ModelConfig, scheme: Scheme, W: Tree, y: State) -> State:
    """The state after two steps with f = g = 0."""
    field = VectorField(lambda W, y: jnp.zeros_like(y), lambda W, y: jnp.zeros_like(y))
    memory = scheme.begin(y, 2)
    for _ in range(2):
        memory = scheme.step(field, (W,) * len(scheme.nodes), memory, config.dt)
    end: State = scheme.end(memory)
    return end


def _refused(config: ModelConfig, what: str) -> InputError:
    return InputError(f"model.scheme={config.scheme} {what}")
