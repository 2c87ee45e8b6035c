"""The parts of a step's gradient: W(t) made once, sums over microbatches, norm, teacher.

W(t) is made once per optimizer step, for each pass by the source of the pass's own grid, and its
gradient is pulled back to the source's parameters once. Between the two,
sequences may go through the model in several microbatches, whose gradients with respect to the made
weights are summed in float32. So accumulation adds no work for the hypernetwork.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.traverse_util import flatten_dict
from jaxtyping import Array, Float

from t5x_diffeq.model.language_model import LanguageModel, source_parameters
from t5x_diffeq.model.layers.array_types import Weights
from t5x_diffeq.model.layers.linear import ADAPTERS
from t5x_diffeq.model.ode.time_dependent_weights import projection_squares
from t5x_diffeq.model.ode.weight_source import Embeddings
from t5x_diffeq.training.losses import StateAndHead
from t5x_diffeq.training.objective import Batch, BatchMetrics, Params, Pass, end_of_pass, split_rows

# gradients of the rest, and of the weights of each pass
GradientsAndMetrics = tuple[tuple[Params, list[Weights]], BatchMetrics]
_MAKERS = ("source", "adapters")  # the parts of the model that make the weights of a pass


class MadeWeights(NamedTuple):
    """The weights of the passes of a step, for each pass a tree with leaves `[nodes, ...]`."""

    trained: list[Weights]  # made by parts of the model that train
    frozen: list[Weights]  # made by parts that don't
    pull_back: Callable[[list[Weights]], tuple[Params]]  # from the trained ones to what makes them
    # e(t) at the nodes of all passes, one after the other, by the name of the generated layer
    embeddings: Embeddings


def make_weights(passes: list[Pass], params: Params, trains: Callable[[str], bool]) -> MadeWeights:
    """Makes the weights of each pass, as its model makes them."""

    def make(makers: Params) -> tuple[list[Weights], Embeddings]:
        """The weights that these parts of the parameters make, and their time embeddings."""
        variables = {"params": {**params, **makers}}
        made = [
            nn.apply(LanguageModel.weights_and_embeddings, each.model)(variables) for each in passes
        ]
        weights = [
            {
                name: w
                for name, w in of_pass.items()
                if ("adapters" if name == ADAPTERS else "source") in makers
            }
            for of_pass, _ in made
        ]
        return weights, _joined([embeddings for _, embeddings in made])

    makers = {name: params[name] for name in _MAKERS if name in params}
    frozen = {name: part for name, part in makers.items() if not trains(name)}
    trained = {name: part for name, part in makers.items() if trains(name)}
    fixed, _ = make(frozen) if frozen else ([{}] * len(passes), {})
    weights, pull_back, embeddings = jax.vjp(make, trained, has_aux=True)
    return MadeWeights(weights, fixed, pull_back, embeddings)


def _joined(trees: list[dict]) -> dict:
    """The trees of several passes as one, whose leaves have the nodes of all passes."""
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *trees)


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


def gradient_norm(
    model: LanguageModel, gradient: Params, d_weights: list[Weights], embeddings: Embeddings
) -> Float[Array, ""]:
    """The global norm of the gradient; of P, from the gradient of W(t), which is smaller.

    The gradient was pulled back from `d_weights`, those of the passes, and `embeddings` are e(t) at
    their nodes.
    """
    with jax.named_scope("gradient norm"):
        declared = source_parameters(model.config)
        squares = projection_squares(declared, _joined(d_weights), embeddings)
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
