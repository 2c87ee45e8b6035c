"""What training minimises: a weighted sum of terms, each of which is a class.

A term has a weight, and a name under which the mean that it computes is reported, unweighted. A new
term is a class here, a key for its weight (`config/keys/train.py`), and a line in `terms_of`. A
term of the logits is a `TokenTerm`: a number of each token, made of its `logits.TokenLosses`.
"""

from dataclasses import dataclass
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float

from t5x_diffeq.config.config import TrainKeys
from t5x_diffeq.training.logits import TokenLosses


@dataclass(frozen=True)
class Outcome:
    """The results of a forward pass over a batch or one of its microbatches."""

    of_tokens: TokenLosses  # what the logits of each token give
    # of each token the mean square over depth and width; None without a penalty
    velocities: Float[Array, "B L"] | None
    mask: Float[Array, "B L"]  # 1 for the tokens that have a loss, and 0 for others
    tokens: Float[Array, ""]  # how many of them the whole batch has

    def mean(self, values: Float[Array, "B L"]) -> Float[Array, ""]:
        """The mean over the tokens that have a loss; of a microbatch, its part of the mean."""
        return (values * self.mask).sum() / self.tokens


@dataclass(frozen=True)
class Term:
    """A term, with its weight in the sum; `name` is what its mean is called in the metrics."""

    weight: float
    name: ClassVar[str]

    def mean(self, outcome: Outcome) -> Float[Array, ""]:
        """Its mean over a batch; of a microbatch, its part of that."""
        raise NotImplementedError


class TokenTerm(Term):
    """A mean over tokens, each of which is charged for its own logits."""

    def values(self, of_tokens: TokenLosses) -> Float[Array, "..."]:
        """The value of each token."""
        raise NotImplementedError

    def mean(self, outcome: Outcome) -> Float[Array, ""]:
        """The mean over tokens."""
        return outcome.mean(self.values(outcome.of_tokens))


def charge(terms: tuple[TokenTerm, ...], of_tokens: TokenLosses) -> Float[Array, "..."]:
    """What each token is charged by all terms."""
    return sum((t.weight * t.values(of_tokens) for t in terms), start=jnp.zeros(()))


class CrossEntropy(TokenTerm):
    """-log p of the next token."""

    name = "loss"

    def values(self, of_tokens: TokenLosses) -> Float[Array, "..."]:
        """Of each token, in nats."""
        return of_tokens.losses


class Distillation(TokenTerm):
    """KL(teacher || model) of the next token (Hinton et al. 2015), which takes the place of a part
    of the cross entropy."""

    name = "distillation"

    def values(self, of_tokens: TokenLosses) -> Float[Array, "..."]:
        """Of each token, in nats."""
        assert of_tokens.divergences is not None, "there is a teacher"
        return of_tokens.divergences


class ZLoss(TokenTerm):
    """The square of the log of the softmax's normaliser, which keeps logits near 0."""

    name = "z_loss"

    def values(self, of_tokens: TokenLosses) -> Float[Array, "..."]:
        """Of each token."""
        return jnp.square(of_tokens.normalisers)


class Velocity(Term):
    """The square of the velocity F(y; W): an ODE that is easy to solve (Finlay et al. 2020)."""

    name = "velocity"

    def mean(self, outcome: Outcome) -> Float[Array, ""]:
        """The mean over depth, width and tokens."""
        assert outcome.velocities is not None, "the pass was charged for its velocity"
        return outcome.mean(outcome.velocities)


def terms_of(keys: TrainKeys, share_of_teacher: float | None) -> list[Term]:
    """The terms of a forward pass.

    A teacher's predictions have a share in what the model learns; None: there is no teacher.
    """
    share = share_of_teacher or 0.0
    always: list[Term] = [CrossEntropy(1 - share)]
    if share_of_teacher is not None:
        always.append(Distillation(share))
    others = [ZLoss(keys.z_loss), Velocity(keys.velocity_penalty)]
    return [*always, *(term for term in others if term.weight)]
