"""The parts of a step's gradient: W(t) made once, sums over microbatches, norm, teacher.

W(t) is made once per optimizer step, and its gradient is pulled back to P once. Between the two,
sequences may go through the model in several microbatches, whose gradients with respect to the made
weights are summed in float32. So accumulation adds no work for the hypernetwork.
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

from t5x_diffeq.model.language_model import LanguageModel, nodes
from t5x_diffeq.model.layers.array_types import Weights
from t5x_diffeq.model.layers.linear import ADAPTERS
from t5x_diffeq.model.ode.time_dependent_weights import projection_squares
from t5x_diffeq.model.ode.weight_source import Embeddings
from t5x_diffeq.training.losses import StateAndHead
from t5x_diffeq.training.objective import Batch, BatchMetrics, Params, Pass, end_of_pass, split_rows

GradientsAndMetrics = tuple[tuple[Params, Weights], BatchMetrics]  # gradients of rest and weights
_MAKERS = ("source", "adapters")  # the parts of the model that make the weights of a pass


class NodesOfPasses(NamedTuple):
    """The times at which the passes of a step read W, one pass after the other."""

    times: Float[np.ndarray, " nodes"]
    slices: list[slice]  # for each pass, which of them are its own
    distinct: np.ndarray  # the index of each time that differs from those before it

    @classmethod
    def of(cls, passes: list[Pass]) -> "NodesOfPasses":
        """Those of these passes."""
        times = [nodes(each.model.config) for each in passes]
        ends = np.cumsum([len(each) for each in times]).tolist()
        slices = [slice(*part) for part in zip([0, *ends], ends, strict=False)]
        _, distinct = np.unique(np.concatenate(times), return_index=True)
        return cls(np.concatenate(times), slices, distinct)

    def split(self, weights: Weights) -> list[Weights]:
        """The weights of each pass."""
        return [jax.tree.map(lambda w, part=part: w[part], weights) for part in self.slices]


class MadeWeights(NamedTuple):
    """The weights of all passes of a step."""

    trained: Weights  # leaves `[nodes, ...]` made by parts of the model that train
    frozen: Weights  # those made by parts that don't
    pull_back: Callable[[Weights], tuple[Params]]  # from the trained ones to what makes them
    embeddings: Embeddings  # e(t) at the nodes, by the name of the generated layer


def make_weights(
    model: LanguageModel,
    params: Params,
    times: Float[np.ndarray, " nodes"],
    trains: Callable[[str], bool],
) -> MadeWeights:
    """Makes W at these times, each once."""

    def make(makers: Params) -> tuple[Weights, Embeddings]:
        """The weights that these parts of the parameters make, and their time embeddings."""
        apply = nn.apply(LanguageModel.weights_and_embeddings, model)
        weights, embeddings = apply({"params": {**params, **makers}}, jnp.asarray(times))
        maker = {name: "adapters" if name == ADAPTERS else "source" for name in weights}
        return {name: w for name, w in weights.items() if maker[name] in makers}, embeddings

    makers = {name: params[name] for name in _MAKERS if name in params}
    frozen = {name: part for name, part in makers.items() if not trains(name)}
    trained = {name: part for name, part in makers.items() if trains(name)}
    fixed, _ = make(frozen) if frozen else ({}, {})
    weights, pull_back, embeddings = jax.vjp(make, trained, has_aux=True)
    return MadeWeights(weights, fixed, pull_back, embeddings)


def trained_rest(params: Params, trains: Callable[[str], bool]) -> Params:
    """The parts that train and make no weights: embeddings, the head and the last norm."""
    return {name: x for name, x in params.items() if trains(name) and name not in _MAKERS}


def accumulate(
    gradient_of_rows: Callable[[Batch, Array], GradientsAndMetrics],
    batch: Batch,
    key: Array,
    parts: int,
) -> GradientsAndMetrics:
    """Sums over microbatches, in float32; each has its own dropout.

    `gradient_of_rows` goes from rows of the batch and a dropout key to gradients and metrics.
    """
    if parts == 1:
        return gradient_of_rows(batch, key)

    def add(
        total: GradientsAndMetrics, part: tuple[Batch, Array]
    ) -> tuple[GradientsAndMetrics, None]:
        return jax.tree.map(
            lambda t, x: t + x.astype(t.dtype), total, gradient_of_rows(*part)
        ), None

    inputs = (
        jax.tree.map(partial(split_rows, microbatches=parts), batch),
        jax.random.split(key, parts),
    )
    shapes = jax.eval_shape(gradient_of_rows, *jax.tree.map(lambda x: x[0], inputs))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), shapes)
    return jax.lax.scan(add, zeros, inputs)[0]


def gradient_norm(gradient: Params, d_weights: Weights, embeddings: Embeddings) -> Float[Array, ""]:
    """The global norm of the gradient; of P, from the gradient of W(t), which is smaller.

    `embeddings` are e(t) at the nodes of `d_weights`, which the gradient was pulled back from.
    """
    with jax.named_scope("gradient norm"):
        squares = projection_squares(d_weights, embeddings)
        known = {("source", *path): square for path, square in squares.items()}
        others = (leaf for path, leaf in flatten_dict(gradient).items() if path not in known)
        projections = sum(known.values(), start=jnp.zeros(()))
        return jnp.sqrt(projections + sum(jnp.square(leaf).sum() for leaf in others))


def make_reader(teacher: LanguageModel, params: Params) -> Callable[[Batch], StateAndHead]:
    """The function from a batch to the teacher's last state and head; its weights are made here.

    It reads each microbatch beside the model, without dropout.
    """
    weights: Weights = nn.apply(LanguageModel.weights, teacher)({"params": params})
    return lambda batch: end_of_pass(teacher, params, batch, weights)[:2]
