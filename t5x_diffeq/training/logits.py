"""Computes the logits of a chunk of tokens, on devices that may share the vocabulary."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from t5x_diffeq.model.layers.mesh import shards_over
from t5x_diffeq.system.errors import InputError


class Vocabulary(NamedTuple):
    """The vocabulary, of which the head of each device holds an equal part."""

    size: int  # the number of tokens, without padding
    axes: tuple[str, ...]  # the mesh axes that split it

    def tokens(self, count: int) -> Int[Array, " v"]:
        """The `count` tokens of this device's head; from `size` on, they are padding."""
        first = jax.lax.axis_index(self.axes) * count if self.axes else 0
        return first + jnp.arange(count)

    def hits(
        self, logits: Float[Array, "chunk v"], targets: Int[Array, " chunk"]
    ) -> Bool[Array, "chunk v"]:
        """Where the logits of the targets are."""
        return self.tokens(logits.shape[1]) == targets[:, None]

    def logits(
        self, states: Float[Array, "chunk D"], head: Float[Array, "v D"]
    ) -> Float[Array, "chunk v"]:
        """This device's logits, summed in float32; the lowest float for padding."""
        logits = jnp.einsum("td,vd->tv", states, head, preferred_element_type=jnp.float32)
        if len(head) * shards_over(self.axes) == self.size:
            return logits
        return jnp.where(self.tokens(len(head)) < self.size, logits, jnp.finfo(jnp.float32).min)

    def sum(self, x: Float[Array, "chunk v"]) -> Float[Array, " chunk"]:
        """Sums over the vocabulary of all devices."""
        return jax.lax.psum(x.sum(-1), self.axes) if self.axes else x.sum(-1)

    def max(self, x: Float[Array, "chunk v"]) -> Float[Array, " chunk"]:
        """Maxima over the vocabulary of all devices."""
        return jax.lax.pmax(x.max(-1), self.axes) if self.axes else x.max(-1)

    def normaliser(self, logits: Float[Array, "chunk v"]) -> Float[Array, " chunk"]:
        """The log of the softmax's normaliser, log sum exp of the logits."""
        highest = self.max(logits)
        return jnp.log(self.sum(jnp.exp(logits - highest[:, None]))) + highest


class LogitsOfChunk(NamedTuple):
    """The logits of a chunk of tokens: the student's, then the teacher's if there is one."""

    vocabulary: Vocabulary
    logits: list[Float[Array, "chunk v"]]  # z of each model
    normalisers: list[Float[Array, " chunk"]]  # log sum exp z of each model
    targets: Int[Array, " chunk"]

    @property
    def hits(self) -> Bool[Array, "chunk v"]:
        """Where the logits of the targets are."""
        return self.vocabulary.hits(self.logits[0], self.targets)

    def log_probabilities(self, model: int) -> Float[Array, "chunk v"]:
        """log q of the student, model 0, or log p of the teacher, model 1.

        Raises:
          InputError: if there is no teacher.
        """
        if model >= len(self.logits):
            raise InputError("a term reads a teacher, and there is none; set train.distill_from")
        return self.logits[model] - self.normalisers[model][:, None]

    def cross_entropy(self) -> Float[Array, " chunk"]:
        """-log q(target) of the student."""
        target_logit = self.vocabulary.sum(jnp.where(self.hits, self.logits[0], 0))
        return self.normalisers[0] - target_logit


def logits_of(
    vocabulary: Vocabulary,
    states: tuple[Array, ...],
    heads: tuple[Array, ...],
    targets: Int[Array, " chunk"],
) -> LogitsOfChunk:
    """The logits of each model, given the models' states and heads."""
    logits = [vocabulary.logits(*model) for model in zip(states, heads, strict=True)]
    normalisers = [vocabulary.normaliser(each) for each in logits]
    return LogitsOfChunk(vocabulary, logits, normalisers, targets)
