"""The parts of a step's gradient: making W(t) once, summing over microbatches, norm, teacher.

W(t) is made once per optimizer step, for each pass by the source of the pass's own grid. If the
sources of several passes are the same function of t, one call makes the weights of all of them. The
sequences then go through the model, in several microbatches if need be, whose gradients with
respect to W(t) are summed in float32. At the end the sum is pulled back once, to the parameters of
the source, such as P. So accumulation adds no work for the hypernetwork.
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

from t5x_diffeq.model.language_model import (
    LanguageModel,
    nodes,
    program_of_source,
    source_parameters,
)
from t5x_diffeq.model.layers.array_types import Weights
from t5x_diffeq.model.layers.linear import ADAPTERS
from t5x_diffeq.model.ode.time_dependent_weights import projection_squares
from t5x_diffeq.model.ode.weight_source import Embeddings
from t5x_diffeq.training.losses import StateAndHead
from t5x_diffeq.training.objective import Batch, BatchMetrics, Params, Pass, end_of_pass, split_rows

# gradients of the parameters that make no weights, and of the weights of each source
GradientsAndMetrics = tuple[tuple[Params, list[Weights]], BatchMetrics]
EmbeddingsOfSources = list[dict[str, Array]]  # the `Embeddings` of each source, at its nodes
_MAKERS = ("source", "adapters")  # the parts of the model that make the weights of a pass


class NodesOfSource(NamedTuple):
    """The times at which passes read the same function W(t), one pass after the other."""

    model: LanguageModel  # the model of one of the passes, whose source makes W for all
    times: Float[np.ndarray, " nodes"]
    slices: list[slice]  # for each of the passes, which of the times are its own
    distinct: np.ndarray  # for each distinct time, the index of its first occurrence

    @classmethod
    def of(cls, models: list[LanguageModel]) -> "NodesOfSource":
        """The nodes of passes with these models."""
        times = [nodes(model.config) for model in models]
        ends = np.cumsum([len(each) for each in times]).tolist()
        slices = [slice(*part) for part in zip([0, *ends], ends, strict=False)]
        _, distinct = np.unique(np.concatenate(times), return_index=True)
        return cls(models[-1], np.concatenate(times), slices, distinct)


class SourcesOfPasses(NamedTuple):
    """The weight sources of a step's passes; passes with the same function W(t) share one."""

    sources: list[NodesOfSource]
    indices: list[tuple[int, int]]  # for each pass: which source, and which of the source's passes

    @classmethod
    def of(cls, passes: list[Pass]) -> "SourcesOfPasses":
        """The sources of these passes."""
        models: dict[str, list[LanguageModel]] = {}
        indices = []
        for model in (each.model for each in passes):
            # A single pass has nothing to share, and lowering a program takes time.
            program = program_of_source(model.config) if len(passes) > 1 else ""
            sharing = models.setdefault(program, [])
            indices.append(([*models].index(program), len(sharing)))
            sharing.append(model)
        return cls([NodesOfSource.of(each) for each in models.values()], indices)

    def split(self, weights: list[Weights]) -> list[Weights]:
        """The weights of each pass, from the weights of each source."""
        parts = [(weights[i], self.sources[i].slices[n]) for i, n in self.indices]
        return [jax.tree.map(lambda w, part=part: w[part], tree) for tree, part in parts]

    def distinct(self, embeddings: EmbeddingsOfSources) -> Embeddings:
        """e(t) at the distinct times of each source, concatenated, from e(t) at all times."""
        pairs = zip(self.sources, embeddings, strict=True)
        return _joined([{name: e[s.distinct] for name, e in es.items()} for s, es in pairs])


class MadeWeights(NamedTuple):
    """What each source of a step makes, at the times of all its passes."""

    trained: list[Weights]  # leaves `[nodes, ...]` made by parts of the model that train
    frozen: list[Weights]  # leaves made by parts that don't train
    # from the gradient of the trained weights to the gradient of the parts that make them
    pull_back: Callable[[list[Weights]], tuple[Params]]
    embeddings: EmbeddingsOfSources  # e(t) at the nodes, by the name of the generated layer


def make_weights(
    sources: list[NodesOfSource], params: Params, trains: Callable[[str], bool]
) -> MadeWeights:
    """Makes the weights of each source, at all its times in one call."""

    def make(makers: Params) -> tuple[list[Weights], EmbeddingsOfSources]:
        """The weights that these parts of the parameters make, and their time embeddings."""
        variables = {"params": {**params, **makers}}
        weights, embeddings = [], []
        for each in sources:
            apply = nn.apply(LanguageModel.weights_and_embeddings, each.model)
            made, e = apply(variables, jnp.asarray(each.times))
            maker = {name: "adapters" if name == ADAPTERS else "source" for name in made}
            weights.append({name: w for name, w in made.items() if maker[name] in makers})
            embeddings.append(e)
        return weights, embeddings

    makers = {name: params[name] for name in _MAKERS if name in params}
    frozen = {name: part for name, part in makers.items() if not trains(name)}
    trained = {name: part for name, part in makers.items() if trains(name)}
    frozen_weights, _ = make(frozen) if frozen else ([{} for _ in sources], [])
    weights, pull_back, embeddings = jax.vjp(make, trained, has_aux=True)
    return MadeWeights(weights, frozen_weights, pull_back, embeddings)


def _joined(trees: list[dict]) -> dict:
    """The trees of several sources, concatenated along their nodes."""
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *trees)


def trained_rest(params: Params, trains: Callable[[str], bool]) -> Params:
    """The parts that train and make no weights: embeddings, the head and the final norm."""
    return {name: x for name, x in params.items() if trains(name) and name not in _MAKERS}


def accumulate(
    gradient_of_rows: Callable[[Batch, Array], GradientsAndMetrics],
    batch: Batch,
    key: Array,
    parts: int,
) -> GradientsAndMetrics:
    """Gradients and metrics, summed in float32 over microbatches, each with its own dropout.

    `gradient_of_rows` takes rows of the batch and a dropout key.
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
    model: LanguageModel,
    gradient: Params,
    d_weights: list[Weights],
    embeddings: EmbeddingsOfSources,
) -> Float[Array, ""]:
    """The global norm of the gradient; P's share is computed from the smaller gradient of W(t).

    Args:
      gradient: the gradient of the parameters, pulled back from `d_weights`.
      d_weights: the gradient of the weights of each source.
      embeddings: e(t) of each source at the nodes of these weights.
    """
    with jax.named_scope("gradient norm"):
        declared = source_parameters(model.config)
        squares = projection_squares(declared, _joined(d_weights), _joined(embeddings))
        of_P = {("source", *path): square for path, square in squares.items()}
        others = (leaf for path, leaf in flatten_dict(gradient).items() if path not in of_P)
        projections = sum(of_P.values(), start=jnp.zeros(()))
        return jnp.sqrt(projections + sum(jnp.square(leaf).sum() for leaf in others))


def make_reader(teacher: LanguageModel, params: Params) -> Callable[[Batch], StateAndHead]:
    """The function from a batch to the teacher's last state and head, without dropout.

    The teacher's weights are made here, once for all microbatches.
    """
    weights: Weights = nn.apply(LanguageModel.weights, teacher)({"params": params})
    return lambda batch: end_of_pass(teacher, params, batch, weights)[:2]
