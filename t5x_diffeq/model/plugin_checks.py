"""Checks of a block and of a weight source of another package, before a model is made of them."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax.traverse_util import flatten_dict
from jaxtyping import Array

from t5x_diffeq.model.block import Block
from t5x_diffeq.model.config import ModelConfig
from t5x_diffeq.model.language_model import LanguageModel, make_source, nodes
from t5x_diffeq.model.layers.array_types import Places, Times, Weights
from t5x_diffeq.model.layers.parameter import flatten_parameters, is_parameter, map_parameters
from t5x_diffeq.model.ode.weight_source import (
    Embeddings,
    LeafPath,
    WeightSource,
    block_parameters,
    cast_by_role,
    dtype_in_use,
    is_projection,
    layer_name,
)
from t5x_diffeq.model.sub_fields import block_of_shapes, make_block
from t5x_diffeq.system.console import log
from t5x_diffeq.system.errors import InputError, describe_foreign

# These replace the model's own sizes, because a check differentiates each leaf of the weights by
# itself.
_SMALL: dict[str, Any] = {
    "block": None,
    "embed_dim": 8,
    "num_heads": 1,
    "num_kv_heads": None,
    "head_dim": None,
    "mlp_dim": 12,
    "max_length": 8,
    "attention": "xla",
}

# A block that only takes its config's sizes is checked with at most so many channels.
_MOST_CHANNELS = 512

# The relative error that rounding to bfloat16 may cause, in the gradient of a P or in dW/dt.
_ROUNDING = 0.02


def check_block(config: ModelConfig) -> None:
    """Checks the block that `model.block` names.

    The dtype of f and g is not checked: a value of fewer bits is promoted where it is added to the
    state.

    Raises:
      InputError: if the block has no f or no g, or if one of them can't be traced, or returns
        another shape than the state's; if f reads later tokens or other documents, or g reads other
        tokens; or if a parameter has no gradient.
    """
    block, named = block_of_shapes(config), f"model.block={config.block}"
    y, places = block.input_shapes()
    for name, inputs in (("f", (y, places)), ("g", (y,))):
        if getattr(type(block), name) is getattr(Block, name):
            raise _refused(named, f"has no {name}; docs/extending.md says what a block needs")
        try:
            value, _ = jax.eval_shape(
                lambda key, *inputs, name=name: block.init_with_output(
                    key, *inputs, deterministic=True, method=name
                ),
                jax.random.key(0),
                *inputs,
            )
        except InputError:
            raise
        except Exception as error:  # another package's code may raise anything
            raise _refused(
                named, f"has a method {name} that can't be traced: {describe_foreign(error)}"
            ) from error
        shape = getattr(value, "shape", None)
        if shape != y.shape:
            returned = list(shape) if shape is not None else type(value).__name__
            raise _refused(
                named, f"has a method {name} that returns {returned} for a state {list(y.shape)}"
            )
    _check_what_is_read(config, named)


def _check_what_is_read(config: ModelConfig, named: str) -> None:
    """Checks which tokens f and g read, and that all parameters learn, at small sizes.

    A block that takes no such sizes is checked at its config's, unless these are large: then a note
    says that it isn't checked.
    """
    every = {"block": config.block, "attention": "xla", "products": "dtype"}
    every |= {"dtype": "float32", "state_dtype": "float32"}
    sizes = [{**_SMALL, **every}, *([every] if config.embed_dim <= _MOST_CHANNELS else [])]
    for number, keys in enumerate(sizes, 1):
        try:
            found = _look_at(make_block(replace(config, **keys)))
            break
        except Exception as error:  # another package's code may raise anything
            if number == len(sizes):
                what = describe_foreign(error)
                log(f"note: {named}: which tokens it reads isn't checked: {what}")
                return
    if np.triu(found.reads_f, 1).any():
        raise _refused(named, "has an f whose value at a token depends on later tokens")
    if found.reads_f[3:, :3].any():
        raise _refused(
            named,
            "has an f whose value at a token depends on another document of the row; "
            "places.segments has the number of each token's document",
        )
    if (found.reads_g & ~np.eye(6, dtype=bool)).any():
        raise _refused(named, "has a g whose value at a token depends on other tokens")
    for path, gradient in flatten_dict(found.d_params).items():
        if not np.asarray(gradient).any():
            raise _refused(named, f"has a parameter {layer_name(path)} without a gradient")
    for name in found.adds_state:
        log(
            f"note: {named}: its {name} adds the state to its value, and so does the scheme; "
            f"{name} is the change alone"
        )


class _Small(NamedTuple):
    """What a block does with a row of two documents of three tokens."""

    reads_f: np.ndarray  # [6, 6] whether f at a token depends on another
    reads_g: np.ndarray
    d_params: dict
    adds_state: list[str]  # of f and g, those that are the state if all parameters are 0


def _look_at(block: Block) -> _Small:
    places = Places(jnp.array([[0, 1, 2, 0, 1, 2]]), jnp.array([[0, 0, 0, 1, 1, 1]]))
    y = jax.random.normal(jax.random.key(1), (1, 6, block.config.embed_dim))
    variables = block.init(jax.random.key(0), y, places)
    params = map_parameters(_with_noise, variables.get("params", {}))

    def evaluate(params: Any, y: Array) -> tuple[Any, Any]:
        apply = partial(block.apply, {"params": params}, y, deterministic=True)
        return apply(places, method="f"), apply(method="g")

    values, pull_back = jax.vjp(evaluate, params, y)
    noise = [jax.random.normal(jax.random.key(2), x.shape).astype(x.dtype) for x in values]
    zeros = [jnp.zeros_like(x) for x in values]

    def reads(which: int) -> np.ndarray:
        """Whether f (0) or g (1) at each token depends on each token."""
        rows = []
        for token in range(6):
            of_token = list(zeros)
            of_token[which] = noise[which].at[:, :token].set(0).at[:, token + 1 :].set(0)
            rows.append(np.abs(np.asarray(pull_back(tuple(of_token))[1][0])).max(-1) > 0)
        return np.stack(rows)

    d_params, _ = pull_back(tuple(noise))
    of_zeros = evaluate(jax.tree.map(jnp.zeros_like, params), y)
    adds = [name for name, x in zip("fg", of_zeros, strict=True) if np.allclose(x, y, atol=1e-6)]
    return _Small(reads(0), reads(1), d_params, adds if flatten_dict(params) else [])


def _with_noise(leaf: Any) -> Array:
    """A parameter with noise, because one that begins at zero may keep others from learning."""
    noise = jax.random.normal(jax.random.key(leaf.value.size), leaf.value.shape)
    return leaf.value + 0.1 * noise


def check_source(config: ModelConfig, depths: Sequence[int] = ()) -> None:
    """Checks the source that `model.weights` names, on a small block of the architecture.

    Raises:
      InputError: if the source makes no weights; if a parameter isn't made by `declare`; if the
        weights aren't the block's tree, one for each time; if a P has no e(t), or W isn't linear in
        P e(t); if `derivative` isn't dW/dt; if a weight isn't finite, or has no gradient; if a
        source has `stored`, and its weights aren't its parameters; or if its parameters differ at
        one of the `depths`.
    """
    small, named = replace(config, **_SMALL), f"model.weights={config.weights}"
    times = jnp.asarray(nodes(small))
    source = make_source(small, parent=None)
    init: Any = jax.jit(source.init_with_output, static_argnames="method")
    try:
        (weights, embeddings), variables = init(jax.random.key(0), times, method="with_embeddings")
        _check_declared(named, variables["params"], embeddings, len(times))
        _check_shapes(named, source, weights, len(times))
        for num_steps in depths:
            LanguageModel(small).at_depth(num_steps)
        params = map_parameters(lambda leaf: leaf.value, variables["params"])
        declared = flatten_parameters(variables["params"])
        projections = [path for path, leaf in declared.items() if is_projection(leaf)]
        exact = source.clone(dtype=jnp.float32, parent=None, name=None)
        linear, learns, derivative_is_right, in_float32 = jax.jit(
            lambda params: (
                _which_are_linear(source, projections, params, times),
                _which_learn(source, params, times),
                _derivative_is_right(source, params, times),
                exact.apply({"params": params}, times),
            )
        )(params)
    except InputError:
        raise
    except Exception as error:  # another package's code may raise anything
        raise _refused(named, f"makes no weights: {describe_foreign(error)}") from error
    for path in projections:
        if not linear[path]:
            raise _refused(
                named,
                f"declares {layer_name(path)} as the P of P e(t), by its axis time_embed, but its "
                "gradient isn't e(t)^T dW with the e(t) that with_embeddings returns; call the "
                "axis something else",
            )
    if not derivative_is_right:
        raise _refused(
            named,
            "has a method derivative that returns something else than dW/dt; correct it, or set "
            "derivative = td.WeightSource.derivative",
        )
    if source.stored:
        cast = cast_by_role(in_float32, block_parameters(source.block, source.inputs), source.dtype)
        for path, leaf in flatten_dict(weights).items():
            if not np.array_equal(leaf, flatten_dict(cast)[path]):
                raise _refused(
                    named,
                    f"says that its parameters are the weights, and makes {layer_name(path)} in "
                    f"{leaf.dtype} from others; set stored = False",
                )
    for path, leaf in flatten_dict(weights).items():
        if not np.isfinite(np.asarray(leaf, np.float32)).all():
            raise _refused(named, f"makes {layer_name(path)} that isn't finite")
        if not learns[path]:
            raise _refused(
                named,
                f"makes {layer_name(path)} from no parameter that trains: its gradient is zero",
            )


def _which_are_linear(
    source: WeightSource, projections: list[LeafPath], params: Any, times: Times
) -> dict[LeafPath, Array]:
    """Whether the gradient of each P is e(t)^T dW, for a random dW."""

    def make(params: Any) -> tuple[Weights, Embeddings]:
        return nn.apply(type(source).with_embeddings, source)({"params": params}, times)

    weights, pull_back, embeddings = jax.vjp(make, params, has_aux=True)
    d_weights = jax.tree.map(
        lambda w: jax.random.normal(jax.random.key(w.size), w.shape, w.dtype), weights
    )
    dW = {(layer_name(path[:-1]), path[-1]): d for path, d in flatten_dict(d_weights).items()}
    (gradient,) = pull_back(d_weights)

    def is_linear(path: LeafPath) -> Array:
        if path not in dW:
            return jnp.array(False)
        dP = flatten_dict(gradient)[path]
        expected = jnp.tensordot(embeddings[path[0]].T, dW[path].astype(jnp.float32), 1)
        return jnp.linalg.norm(dP - expected) <= _ROUNDING * jnp.linalg.norm(expected)

    return {path: is_linear(path) for path in projections}


def _derivative_is_right(source: WeightSource, params: Any, times: Times) -> Array:
    """Whether the source's own derivative is dW/dt, in a random direction of W at each time."""
    derivative = type(source).derivative
    if not source.any_time or derivative is WeightSource.derivative:
        return jnp.array(True)
    exact = source.clone(dtype=jnp.float32, parent=None, name=None)
    # In reverse mode, because the custom gradient of P e(t) has no forward mode (`contraction`).
    weights, pull_back = jax.vjp(lambda times: exact.apply({"params": params}, times), times)
    directions = jax.tree.map(lambda w: jax.random.normal(jax.random.key(w.size), w.shape), weights)
    (expected,) = pull_back(directions)
    rates = nn.apply(derivative, source)({"params": params}, times)
    products = jax.tree.map(lambda d, w: (d * w).reshape(len(times), -1).sum(1), directions, rates)
    found = jax.tree.reduce(jnp.add, products)
    return jnp.linalg.norm(found - expected) <= _ROUNDING * jnp.linalg.norm(expected)


def _which_learn(source: WeightSource, params: Any, times: Times) -> dict[LeafPath, Array]:
    """Whether each of the weights has a gradient with respect to any parameter."""

    def make(params: Any) -> dict[LeafPath, Array]:
        return flatten_dict(source.apply({"params": params}, times))

    weights, pull_back = jax.vjp(make, params)
    zeros = jax.tree.map(jnp.zeros_like, weights)

    def learns(path: LeafPath) -> Array:
        (gradient,) = pull_back({**zeros, path: jnp.ones_like(weights[path])})
        return jnp.stack([jnp.any(g != 0) for g in jax.tree.leaves(gradient)]).any()

    return {path: learns(path) for path in weights}


def _check_declared(named: str, declared: dict, embeddings: dict, count: int) -> None:
    for path, leaf in flatten_parameters(declared).items():
        name = layer_name(path)
        if not is_parameter(leaf):
            raise _refused(
                named,
                f"has a parameter {name} without role and axes; make it by "
                "t5x_diffeq.model.layers.parameter.declare",
            )
        e = embeddings.get(layer_name(path[:-1]))
        if is_projection(leaf) and (e is None or e.shape != (count, leaf.value.shape[0])):
            raise _refused(
                named,
                f"declares {name} as the P of P e(t), by its axis time_embed; with_embeddings must "
                f"return that e(t), [{count}, {leaf.value.shape[0]}], as "
                f"{layer_name(path[:-1])!r}",
            )


def _check_shapes(named: str, source: WeightSource, weights: Weights, count: int) -> None:
    expected = block_parameters(source.block, source.inputs)
    made = flatten_dict(weights)
    for path in sorted({*expected} ^ {*made}):
        verb = "doesn't make" if path in expected else "makes"
        has = "has" if path in expected else "hasn't"
        raise _refused(named, f"{verb} {layer_name(path)}, which the block {has}")
    for path, leaf in expected.items():
        shape, dtype = (count, *leaf.value.shape), dtype_in_use(leaf.role, source.dtype)
        if made[path].shape != shape or made[path].dtype != dtype:
            raise _refused(
                named,
                f"makes {layer_name(path)} as {made[path].dtype}{list(made[path].shape)} for "
                f"{count} times; the block takes {jnp.dtype(dtype)}{list(shape)}",
            )


def _refused(named: str, what: str) -> InputError:
    return InputError(f"{named} {what}")
