"""The logits of a chunk of tokens, and the numbers per token that are made of them.

Each number has its value and its gradient side by side. The gradient is written by hand: in the one
that JAX derives, masks and constants of the logits' size are moved out of the loop over chunks, for
every chunk to read from memory (docs/lab/h100.md).
"""

from functools import reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from t5x_diffeq.model.layers.mesh import shards_over


class TokenLosses(NamedTuple):
    """What is computed from the logits of each token, in nats; float32.

    A further number per token is a field here and a class in `NUMBERS`, which has its value and
    its gradient side by side.
    """

    losses: Float[Array, "..."]  # -log p(target)
    normalisers: Float[Array, "..."]  # the log of the softmax's normaliser
    divergences: Float[Array, "..."] | None = None  # KL(teacher || student); None without a teacher

    def given(self) -> tuple[Float[Array, "..."], ...]:
        """Those that there are."""
        return tuple(x for x in self if x is not None)


class Vocabulary(NamedTuple):
    """The vocabulary, of which a device's head holds an equal part."""

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
        """Sums over the vocabulary."""
        return jax.lax.psum(x.sum(-1), self.axes) if self.axes else x.sum(-1)

    def max(self, x: Float[Array, "chunk v"]) -> Float[Array, " chunk"]:
        """The highest over the vocabulary."""
        return jax.lax.pmax(x.max(-1), self.axes) if self.axes else x.max(-1)

    def normaliser(self, logits: Float[Array, "chunk v"]) -> Float[Array, " chunk"]:
        """The log of the softmax's normaliser."""
        highest = self.max(logits)
        return jnp.log(self.sum(jnp.exp(logits - highest[:, None]))) + highest


class LogitsOfChunk(NamedTuple):
    """The logits of a chunk of tokens, with those of a teacher after the student's."""

    vocabulary: Vocabulary
    logits: list[Float[Array, "chunk v"]]  # z of each model
    normalisers: list[Float[Array, " chunk"]]  # the logs of their softmaxes' normalisers
    targets: Int[Array, " chunk"]

    @property
    def hits(self) -> Bool[Array, "chunk v"]:
        """Where the logits of the targets are."""
        return self.vocabulary.hits(self.logits[0], self.targets)

    def log_probabilities(self, model: int) -> Float[Array, "chunk v"]:
        """log q of the student, number 0, or log p of the teacher."""
        return self.logits[model] - self.normalisers[model][:, None]

    def losses(self) -> TokenLosses:
        """All numbers of the tokens; without a teacher, all but the divergences."""
        has_teacher = len(self.logits) == 2
        made = (name for name in NUMBERS if has_teacher or name != "divergences")
        return TokenLosses(**{name: NUMBERS[name].value(self) for name in made})

    def gradient(self, d: TokenLosses) -> Float[Array, "chunk v"]:
        """That of the student's logits, from that of the numbers."""
        numbers = zip(NUMBERS.values(), d, strict=True)
        parts = (number.pull_back(self, each) for number, each in numbers if each is not None)
        return reduce(jnp.add, parts)


# A number per token, made of its logits z, has a value and the gradient of the student's logits
# from that of the value. It leaves out the logits of padding, and sums over the mesh axes that
# split the vocabulary.


class _CrossEntropy:
    """-log q(target); its gradient is q - onehot(target)."""

    @staticmethod
    def value(chunk: LogitsOfChunk) -> Float[Array, " chunk"]:
        target_logit = chunk.vocabulary.sum(jnp.where(chunk.hits, chunk.logits[0], 0))
        return chunk.normalisers[0] - target_logit

    @staticmethod
    def pull_back(chunk: LogitsOfChunk, d: Float[Array, " chunk"]) -> Float[Array, "chunk v"]:
        q = jnp.exp(chunk.log_probabilities(0))
        return d[:, None] * q - jnp.where(chunk.hits, d[:, None], 0)


class _Normaliser:
    """log sum exp z; its gradient is q."""

    @staticmethod
    def value(chunk: LogitsOfChunk) -> Float[Array, " chunk"]:
        return chunk.normalisers[0]

    @staticmethod
    def pull_back(chunk: LogitsOfChunk, d: Float[Array, " chunk"]) -> Float[Array, "chunk v"]:
        return d[:, None] * jnp.exp(chunk.log_probabilities(0))


class _Divergence:
    """KL(p || q), p the teacher's; its gradient is q - p."""

    @staticmethod
    def value(chunk: LogitsOfChunk) -> Float[Array, " chunk"]:
        log_q, log_p = chunk.log_probabilities(0), chunk.log_probabilities(1)
        return chunk.vocabulary.sum(jnp.exp(log_p) * (log_p - log_q))

    @staticmethod
    def pull_back(chunk: LogitsOfChunk, d: Float[Array, " chunk"]) -> Float[Array, "chunk v"]:
        q, p = (jnp.exp(chunk.log_probabilities(model)) for model in (0, 1))
        return d[:, None] * q - d[:, None] * p


NUMBERS: dict[str, Any] = {
    "losses": _CrossEntropy,
    "normalisers": _Normaliser,
    "divergences": _Divergence,
}
assert tuple(NUMBERS) == TokenLosses._fields  # each with its gradient


def logits_of(
    vocabulary: Vocabulary,
    states: tuple[Array, ...],
    heads: tuple[Array, ...],
    targets: Int[Array, " chunk"],
) -> LogitsOfChunk:
    """The logits of each model."""
    logits = [vocabulary.logits(*model) for model in zip(states, heads, strict=True)]
    normalisers = [vocabulary.normaliser(each) for each in logits]
    return LogitsOfChunk(vocabulary, logits, normalisers, targets)
