"""The gradient of an optimizer step: W(t) is made once, and its gradient pulled back to P once.

Between the two, sequences may go through the model in several microbatches, whose gradients with
respect to the made weights are summed in float32. So accumulation adds no work for the
hypernetwork. Frozen parts have no gradient, and neither have the weights that they make.

A teacher's weights are made once, too. It reads each microbatch beside the model, without dropout.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax.traverse_util import flatten_dict
from jaxtyping import Array, Float

from t5x_diffeq.array_types import Times, Weights
from t5x_diffeq.layers.linear import ADAPTERS
from t5x_diffeq.models.language_model import LanguageModel, nodes
from t5x_diffeq.models.sub_fields import block_of_shapes
from t5x_diffeq.ode.weights import (
    Embeddings,
    LeafPath,
    block_parameters,
    projection_squares,
)
from t5x_diffeq.runtime.config import TrainKeys
from t5x_diffeq.training.losses import StateAndHead
from t5x_diffeq.training.objective import (
    Batch,
    Means,
    Params,
    count_tokens,
    end_of_pass,
    objective,
    passes_of,
    split_rows,
)

Curves = dict[str, Float[Array, " n"]]
_Gradients = tuple[tuple[Params, Weights], Means]  # of the rest and of the weights
_MAKERS = ("source", "adapters")  # the parts of the model that make the weights of a pass


class BatchGradient(NamedTuple):
    """The gradient of a batch, and what else its computation has found.

    Attributes:
      gradient: of the parts that train.
      norm: its global norm.
      means: what is reported of the batch, by name.
      embeddings: e(t) at the times at which the step read W, each once, by the name of the
        generated layer.
      curves: what `watch` returned of the gradient of the weights on the model's own grid.
    """

    gradient: Params
    norm: Float[Array, ""]
    means: Means
    embeddings: Embeddings
    curves: Curves


def make_gradient(
    model: LanguageModel,
    trains: Callable[[str], bool],
    keys: TrainKeys,
    depths: tuple[int, ...] | None = None,
    teacher: LanguageModel | None = None,
    watch: Callable[[Weights], Curves] | None = None,
) -> Callable[..., BatchGradient]:
    """The function from parameters, a batch and a dropout key to the gradient and more.

    The gradient is of the parts that train. With a teacher, the function's fourth argument is the
    teacher's parameters.

    The means are those of `objective`: the cross entropy `loss`, the KL divergence from a teacher
    or from the largest depth `distillation`, the mean square of the `velocity` if it has a penalty,
    and the block's `running_cost`.

    Args:
      model: the language model.
      trains: whether a part of the parameters, given its name, trains.
      keys: `config.train`: each device's rows must be divisible by its microbatches.
      depths: numbers of solver steps over which the loss is the mean; None is the model's own.
      teacher: the model on its own grid whose predictions are distilled, if any.
      watch: a function of the gradient of the weights on the model's own grid; of {} if the loss is
        on other grids alone.
    """
    passes = passes_of(model, depths, keys)
    models = [each.model for each in passes]
    times = [nodes(each.config) for each in models]
    ends = np.cumsum([len(of_model) for of_model in times]).tolist()
    parts = [slice(*part) for part in zip([0, *ends], ends, strict=False)]  # of each model's nodes
    block = block_of_shapes(model.config)
    declared = block_parameters(block, block.input_shapes())
    _, distinct = np.unique(np.concatenate(times), return_index=True)

    def gradient(
        params: Params, batch: Batch, key: Array, teacher_params: Params | None = None
    ) -> BatchGradient:
        make = partial(_make_weights_of, model, jnp.asarray(np.concatenate(times)))
        training = {name: part for name, part in params.items() if trains(name)}
        makers = {name: part for name, part in training.items() if name in _MAKERS}
        rest = {name: part for name, part in training.items() if name not in _MAKERS}
        frozen = {name: params[name] for name in _MAKERS if name in params and not trains(name)}
        fixed, _ = make(params, frozen) if frozen else ({}, {})
        weights, pull_back, embeddings = jax.vjp(partial(make, params), makers, has_aux=True)

        read = _make_reader(teacher, teacher_params) if teacher and teacher_params else None

        tokens = count_tokens(passes, batch["mask"], keys.microbatches)

        def loss(rest: Params, weights: Weights, batch: Batch, key: Array) -> tuple[Array, Means]:
            merged, weights = {**params, **rest}, {**fixed, **weights}
            own = [jax.tree.map(lambda w, part=part: w[part], weights) for part in parts]
            theirs = read(batch) if read else None
            return objective(passes, merged, own, batch, tokens, keys, key, theirs)

        of_part: Callable[[Batch, Array], _Gradients] = partial(
            jax.grad(loss, argnums=(0, 1), has_aux=True), rest, weights
        )
        (d_rest, d_weights), means = (
            of_part(batch, key)
            if keys.microbatches == 1
            else _accumulate(of_part, batch, key, keys.microbatches)
        )
        d_weights = jax.tree.map(lambda d, w: d.astype(w.dtype), d_weights, weights)
        with jax.named_scope("pull back to P"):
            (d_makers,) = pull_back(d_weights)
        gradient = {**d_makers, **d_rest}
        with jax.named_scope("gradient norm"):
            squares = projection_squares(d_weights, embeddings, declared)
            of_source = {("source", *path): square for path, square in squares.items()}
            norm = _norm(gradient, of_source)
        at_nodes = {name: e[distinct] for name, e in embeddings.items()}
        own = next((part for each, part in zip(models, parts, strict=True) if each == model), None)
        d_own = jax.tree.map(lambda d: d[own], d_weights) if own else {}
        curves = watch(d_own) if watch else {}
        return BatchGradient(gradient, norm, means, at_nodes, curves)

    return gradient


def _make_weights_of(
    model: LanguageModel, times: Times, params: Params, makers: Params
) -> tuple[Weights, Embeddings]:
    """The weights made by the parts of the parameters in `makers`, and their time embeddings."""
    make = nn.apply(LanguageModel.weights_and_embeddings, model)
    weights, embeddings = make({"params": {**params, **makers}}, times)
    theirs = {name: leaves for name, leaves in weights.items() if _maker_of(name) in makers}
    return theirs, embeddings


def _maker_of(name: str) -> str:
    """The part of the parameters that makes the weights of this name."""
    return "adapters" if name == ADAPTERS else "source"


def _accumulate(
    of_part: Callable[[Batch, Array], _Gradients], batch: Batch, key: Array, parts: int
) -> _Gradients:
    """Sums over the microbatches, in float32; each has its own dropout."""

    def add(total: _Gradients, part: tuple[Batch, Array]) -> tuple[_Gradients, None]:
        return jax.tree.map(lambda t, x: t + x.astype(t.dtype), total, of_part(*part)), None

    inputs = (
        jax.tree.map(partial(split_rows, microbatches=parts), batch),
        jax.random.split(key, parts),
    )
    shapes = jax.eval_shape(of_part, *jax.tree.map(lambda x: x[0], inputs))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), shapes)
    return jax.lax.scan(add, zeros, inputs)[0]


def _norm(gradient: Params, squares: dict[LeafPath, Float[Array, ""]]) -> Float[Array, ""]:
    """The global norm of the gradient, given the squared norms of some of its leaves by path."""
    others = (leaf for path, leaf in flatten_dict(gradient).items() if path not in squares)
    known = sum(squares.values(), start=jnp.zeros(()))
    return jnp.sqrt(known + sum(jnp.square(leaf).sum() for leaf in others))


def _make_reader(teacher: LanguageModel, params: Params) -> Callable[[Batch], StateAndHead]:
    """The function from a batch to the teacher's last state and head; its weights are made here."""
    weights: Weights = nn.apply(LanguageModel.weights, teacher)({"params": params})
    return lambda batch: end_of_pass(teacher, params, batch, weights)[:2]
