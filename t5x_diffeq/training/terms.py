"""The terms of what an optimizer step minimises.

A term is a mean over tokens, which is reported under the term's name, times a weight. The value at
a token is computed from the token's logits (`LogitsTerm`), or from its states along the depth
(`StatesTerm`). `train.terms` names terms of other packages.
"""

from dataclasses import dataclass
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float

from t5x_diffeq.config.config import TrainKeys
from t5x_diffeq.config.plugins import make_plugin
from t5x_diffeq.model.layers.array_types import State
from t5x_diffeq.training.logits import LogitsOfChunk

KEY = "train.terms"


@dataclass(frozen=True)
class Term:
    """A mean over tokens, and its weight in what is minimised."""

    name: ClassVar[str]  # the name under which the mean is reported, unweighted
    weight: float


class LogitsTerm(Term):
    """A term whose value at a token is made of the token's logits z.

    A term has a value and its gradient, which is written by hand. From the gradient that JAX
    derives, XLA moves masks and constants of the logits' size out of the loop over chunks, and
    every chunk reads them from memory (docs/lab/h100.md). Neither value nor gradient may depend on
    the logits of padding, which are the lowest float. Sums over the vocabulary are
    `logits.vocabulary.sum(x)`, because a device may have a part of it.
    """

    def value(self, logits: LogitsOfChunk) -> Float[Array, " chunk"]:
        """A number per token, float32."""
        raise NotImplementedError

    def pull_back(
        self, logits: LogitsOfChunk, d: Float[Array, " chunk"]
    ) -> Float[Array, "chunk v"]:
        """The gradient with respect to the student's logits, given d, the values' gradient."""
        raise NotImplementedError


class StatesTerm(Term):
    """A term whose value at a token is the mean over depth of a rate; JAX derives its gradient."""

    def rate(self, y: State, velocity: State) -> Float[Array, "B L"]:
        """A number per token, float32, of the state at a depth and F(y; W(t)) there."""
        raise NotImplementedError


class CrossEntropy(LogitsTerm):
    """-log q(target), in nats; its gradient is q - onehot(target)."""

    name = "loss"

    def value(self, logits: LogitsOfChunk) -> Float[Array, " chunk"]:  # noqa: D102
        return logits.cross_entropy()

    def pull_back(  # noqa: D102
        self, logits: LogitsOfChunk, d: Float[Array, " chunk"]
    ) -> Float[Array, "chunk v"]:
        q = jnp.exp(logits.log_probabilities(0))
        return d[:, None] * q - jnp.where(logits.hits, d[:, None], 0)


class Distillation(LogitsTerm):
    """KL(p || q), p the teacher's probabilities; its gradient is q - p (Hinton et al. 2015)."""

    name = "distillation"

    def value(self, logits: LogitsOfChunk) -> Float[Array, " chunk"]:  # noqa: D102
        log_q, log_p = logits.log_probabilities(0), logits.log_probabilities(1)
        return logits.vocabulary.sum(jnp.exp(log_p) * (log_p - log_q))

    def pull_back(  # noqa: D102
        self, logits: LogitsOfChunk, d: Float[Array, " chunk"]
    ) -> Float[Array, "chunk v"]:
        q, p = (jnp.exp(logits.log_probabilities(model)) for model in (0, 1))
        return d[:, None] * q - d[:, None] * p


class ZLoss(LogitsTerm):
    """n^2, n = log sum exp z; it keeps n near 0 (Chowdhery et al. 2022); its gradient is 2 n q."""

    name = "z_loss"

    def value(self, logits: LogitsOfChunk) -> Float[Array, " chunk"]:  # noqa: D102
        return jnp.square(logits.normalisers[0])

    def pull_back(  # noqa: D102
        self, logits: LogitsOfChunk, d: Float[Array, " chunk"]
    ) -> Float[Array, "chunk v"]:
        d = 2 * logits.normalisers[0] * d
        return d[:, None] * jnp.exp(logits.log_probabilities(0))


class VelocityPenalty(StatesTerm):
    """The mean square of F, which makes an ODE easy to solve (Finlay et al. 2020)."""

    name = "velocity"

    def rate(self, y: State, velocity: State) -> Float[Array, "B L"]:  # noqa: D102
        return jnp.square(velocity.astype(jnp.float32)).mean(-1)


def logits_terms(train: TrainKeys, share_of_teacher: float | None) -> list[LogitsTerm]:
    """The terms of a forward pass that are made of its logits; the cross entropy comes first.

    `share_of_teacher` of the cross entropy is replaced by the divergence from the teacher; None:
    there is no teacher.
    """
    share = share_of_teacher or 0.0
    terms: list[LogitsTerm] = [CrossEntropy(1 - share)]
    if train.z_loss:
        terms.append(ZLoss(train.z_loss))
    if share_of_teacher is not None:
        terms.append(Distillation(share))
    return [*terms, *(term for term in load_terms(train.terms) if isinstance(term, LogitsTerm))]


def states_terms(train: TrainKeys) -> list[StatesTerm]:
    """The terms of a forward pass that are made of its states."""
    penalty = [VelocityPenalty(train.velocity_penalty)] if train.velocity_penalty else []
    return [*penalty, *(term for term in load_terms(train.terms) if isinstance(term, StatesTerm))]


def load_terms(names: tuple[str, ...]) -> list[Term]:
    """The terms that `train.terms` names.

    Raises:
      InputError: if a name doesn't name a term.
    """
    return [make_plugin(KEY, name, LogitsTerm, StatesTerm) for name in names]
