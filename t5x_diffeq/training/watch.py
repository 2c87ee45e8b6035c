"""Measures what happens inside the model at an optimizer step, as curves over depth.

    gradient/LAYER   |dL/dW(t_n)|                         at each node t_n of the model's own grid
    weights/LAYER    |W(t_n)|                             before the step
    update/LAYER     |W(t_n) after - W(t_n) before|        what the step changed
    dW_dt/LAYER      |dW/dt(t_n)|                         before the step
    f, g             rms of f(y; W) and of g(y; W)        in each solver step, over its evaluations
    state            rms of y                             at t = 0, 1/N, ..., 1

|.| is the Frobenius norm over all leaves of a layer (a linear or a norm of the block, named by its
path): kernel and bias together. An rms is over tokens and width, on a few rows of the step's batch.
dL/dW is the gradient before it is clipped.

Only the train step has dL/dW. The other curves come from two small programs of their own, which run
before and after the train step, so that it holds no array longer than without the curves.
"""

from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.traverse_util import flatten_dict
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from t5x_diffeq.model.config import ModelConfig
from t5x_diffeq.model.language_model import LanguageModel, in_one_document
from t5x_diffeq.model.layers.array_types import Places, State, Weights
from t5x_diffeq.model.layers.context import to_zigzag
from t5x_diffeq.model.layers.linear import ADAPTERS
from t5x_diffeq.model.ode.integrate import StepInputs, scan_steps, step_function, step_inputs
from t5x_diffeq.model.ode.solvers import Memory, SubField, VectorField, find_scheme
from t5x_diffeq.model.ode.sources import source_of
from t5x_diffeq.model.ode.weight_source import layer_name
from t5x_diffeq.model.sub_fields import vector_field
from t5x_diffeq.training.objective import Batch, Params, places_of
from t5x_diffeq.training.partitioning import batch_shards
from t5x_diffeq.training.setup import Setup

Curves = dict[str, Float[Array, " n"]]
_ROWS = 4  # f, g and the state are of at least this many rows of the batch, and one per shard


def _norms(kind: str, weights: Weights) -> Curves:
    """The norm of each layer at each node: leaves `[nodes, ...]` become `[nodes]`, `KIND/LAYER`."""
    squares: dict[str, Array] = defaultdict(lambda: jnp.zeros(()))
    for path, leaf in flatten_dict(weights).items():
        kernel = tuple(range(1, leaf.ndim))
        squares[layer_name(path[:-1])] += jnp.square(leaf.astype(jnp.float32)).sum(kernel)
    return {f"{kind}/{layer}": jnp.sqrt(square) for layer, square in squares.items()}


def watch_gradient(d_weights: Weights, every: int | None) -> Curves:
    """The norms of the gradient of W(t_n); {} if no step is watched.

    Every step computes them, not only the steps to watch: in a conditional branch, XLA's CPU
    devices of several processes sometimes waited for each other's sums without end.
    """
    return {} if every is None else _norms("gradient", d_weights)


def _exact_weights(model: LanguageModel, params: Params) -> Weights:
    """W(t_n) in float32: an update of bfloat16 weights would be lost in their rounding."""
    exact = LanguageModel(model.config.in_float32())
    return nn.apply(LanguageModel.weights, exact)({"params": params})


def _rates(model: LanguageModel, params: Params, weights: Weights) -> Weights:
    """dW/dt at the nodes; for the weights of K layers at k/K, the differences K (W_(k+1) - W_k).

    Adapters are left out: they are two factors, not weights.
    """
    if source_of(model.config).any_time:
        return nn.apply(LanguageModel.derivative, model)({"params": params})
    block_weights = {name: leaves for name, leaves in weights.items() if name != ADAPTERS}
    return jax.tree.map(lambda W: len(W) * (W[1:] - W[:-1]), block_weights)


def _rms(x: Array) -> Float[Array, ""]:
    return jnp.sqrt(jnp.square(x.astype(jnp.float32)).mean())


def sizes(config: ModelConfig, weights: Weights, y: State, places: Places) -> Curves:
    """The rms of f and of g in each solver step, and of the state at the steps' ends.

    `y` is the state at t = 0, and `places` says where its tokens stand.
    """
    y, places = to_zigzag(y, places)
    field = vector_field(config, places)(None)

    scheme = find_scheme(config.scheme)

    def step(memory: Memory, inputs: StepInputs) -> tuple[Memory, dict[str, Array]]:
        values: dict[str, list[Array]] = {"f": [], "g": []}

        def note(name: str, sub_field: SubField) -> SubField:
            def noted(W: Weights, y: State) -> State:
                value = sub_field(W, y)
                values[name].append(_rms(value))
                return value

            return noted

        noting = VectorField(note("f", field.f), note("g", field.g))
        after = step_function(lambda _: noting, config.scheme, config.dt)(memory, inputs)
        evaluations = {name: _rms(jnp.stack(each)) for name, each in values.items()}
        return after, {**evaluations, "state": _rms(scheme.end(memory))}

    inputs = step_inputs(weights, config.scheme, config.num_steps, key=None)
    last, curves = scan_steps(step, scheme.begin(y, config.num_steps), inputs, scheme.grows)
    return {**curves, "state": jnp.append(curves["state"], _rms(scheme.end(last)))}


def _some_rows(batch: Batch, shards: int) -> Batch:
    """A few rows of a batch, as many from each of its shards, so that none is moved."""
    rows = len(batch["inputs"])
    per_shard = rows // shards
    enough = (n for n in range(1, per_shard + 1) if per_shard % n == 0 and n * shards >= _ROWS)
    wanted = next(enough, per_shard)  # a small batch is taken whole
    groups = wanted * shards
    return {name: x.reshape(groups, -1, *x.shape[1:])[:, 0] for name, x in batch.items()}


class Programs(NamedTuple):
    """The two compiled programs that run around a step."""

    # the weights in float32, and all curves except gradient and update
    before: Callable[[Params, Batch], tuple[Weights, Curves]]
    after: Callable[[Params, Weights], Curves]  # the curves of the update, given these weights


def compile_programs(setup: Setup, batch_size: int) -> Programs:
    """Compiles both programs; call this within `setup.context()`."""
    model, whole = setup.model, NamedSharding(setup.mesh, PartitionSpec())
    params, batch = setup.abstract_state.params, setup.abstract_batch(batch_size)
    shards = batch_shards(setup.mesh.shape)

    def before(params: Params, batch: Batch) -> tuple[Weights, Curves]:
        weights = _exact_weights(model, params)
        rows = _some_rows(batch, shards)
        places = places_of(rows) or in_one_document(rows["inputs"])
        y = nn.apply(LanguageModel.embed, model)({"params": params}, rows["inputs"], places)
        used = nn.apply(LanguageModel.weights, model)({"params": params})
        curves = _norms("weights", weights) | sizes(model.config, used, y, places)
        return weights, curves | _norms("dW_dt", _rates(model, params, weights))

    def after(params: Params, before: Weights) -> Curves:
        change = jax.tree.map(jnp.subtract, _exact_weights(model, params), before)
        return _norms("update", change)

    first = jax.jit(before, out_shardings=(None, whole)).lower(params, batch).compile()
    shapes, _ = jax.eval_shape(before, params, batch)
    weights = jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        shapes,
        first.output_shardings[0],
    )
    second = jax.jit(after, out_shardings=whole).lower(params, weights).compile()
    return Programs(first, second)
