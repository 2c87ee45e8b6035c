"""Checks of the terms that `train.terms` names: what they return, and their gradient."""

from collections.abc import Callable, Sequence
from math import isfinite
from numbers import Real
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from t5x_diffeq.config.config import TrainKeys
from t5x_diffeq.system.errors import InputError, describe_foreign
from t5x_diffeq.training import terms
from t5x_diffeq.training.logits import LogitsOfChunk, Vocabulary
from t5x_diffeq.training.terms import LogitsTerm, StatesTerm, Term

# The names of what a step reports besides its terms. A term can't have these names.
OTHERS = (
    *("grad_norm", "learning_rate", "num_steps", "targets", "tokens_per_second", "step_seconds"),
    *("data_wait", "goodput", "mfu", "spike", "spikes", "host_memory_gib", "device_memory_gib"),
    "device_memory_peak_gib",
)
_TOKENS, _VOCABULARY, _ROWS = 5, 7, 10  # three rows are padding
_TARGETS = (0, 6, 3, 3, 1)
_TOLERANCE = 1e-4  # relative to the largest entry of a gradient


def check_terms(train: TrainKeys) -> None:
    """Checks the terms on the logits of a few tokens, and on a few states.

    Raises:
      InputError: if a term has no weight, or a name that is taken; if its value isn't a
        finite number for each token, made of this token alone; if a part of the vocabulary gives
        another value than the whole; if its gradient is zero or isn't the value's.
    """
    taken = [
        each.name
        for each in (terms.CrossEntropy, terms.Distillation, terms.ZLoss, terms.VelocityPenalty)
    ]
    taken += OTHERS
    for given, term in zip(train.terms, terms.load_terms(train.terms), strict=True):
        check_term(term, f"{terms.KEY}={given}", taken, bool(train.distill_from))
        taken.append(term.name)


def check_term(term: Term, where: str, taken: Sequence[str], has_teacher: bool) -> None:
    """Checks one term, whose name may not be one of `taken`; `where` begins its errors."""
    check = _Check(where, has_teacher)
    check.facts(term, taken)
    if isinstance(term, LogitsTerm):
        check.logits_term(term)
    elif isinstance(term, StatesTerm):
        check.states_term(term)


class _Check:
    """The checks of a term; `where` begins their errors."""

    def __init__(self, where: str, has_teacher: bool):
        self.where, self.models = where, 2 if has_teacher else 1

    def refuse(self, what: str) -> InputError:
        return InputError(f"{self.where}: {what}")

    def facts(self, term: Term, taken: Sequence[str]) -> None:
        """Checks the weight and the name."""
        weight, name = term.weight, getattr(term, "name", None)
        if not isinstance(weight, Real) or not isfinite(weight) or weight == 0:
            raise self.refuse(f"its weight is {weight!r}; give a finite number other than 0")
        if not isinstance(name, str) or not name.isidentifier() or name in taken:
            raise self.refuse(
                f"its name is {name!r}; give its class a `name`, an identifier other than "
                f"{', '.join(taken)}"
            )

    def logits_term(self, term: LogitsTerm) -> None:
        """Checks the value and its gradient, with the whole vocabulary and with its two halves."""
        student, teacher, noise = jax.random.normal(jax.random.key(0), (3, _TOKENS, _ROWS))
        d = jnp.tanh(noise[:, 0])
        padded = jnp.arange(_ROWS) >= _VOCABULARY
        models = [jnp.where(padded, jnp.finfo(jnp.float32).min, z) for z in (student, teacher)]
        models = models[: self.models]

        def value_of(student: Array) -> Array:
            return term.value(_logits((), [student, *models[1:]]))

        def in_parts(models: list[Array]) -> tuple[Array, Array]:
            logits = _logits(("vocab",), models)
            return term.value(logits), term.pull_back(logits, d)

        value, pull_back = self.call(lambda: jax.vjp(value_of, models[0]))
        self.numbers(value, (_TOKENS,))
        expected = np.asarray(pull_back(d)[0])
        gradient = np.asarray(self.call(lambda: term.pull_back(_logits((), models), d)))
        scale = np.abs(expected).max()
        if scale == 0:
            raise self.refuse("its value has no gradient; a constant can't be minimised")
        if gradient.shape != expected.shape:
            raise self.refuse(
                f"`pull_back` returns {list(gradient.shape)} for logits {list(expected.shape)}"
            )
        error = np.abs(gradient - expected)
        if not error.max() <= _TOLERANCE * scale:
            token, entry = np.unravel_index(np.argmax(error), error.shape)
            kind = "padding" if entry >= _VOCABULARY else "no target"
            kind = "the target" if entry == _TARGETS[token] else kind
            raise self.refuse(
                "`pull_back` isn't the gradient of `value`: they differ most by "
                f"{error.max():.2g}, at token {token} (d = {d[token]:.2g}), entry {entry} "
                f"({kind}): `pull_back` gives {gradient[token, entry]:.4g}, and JAX's gradient of "
                f"`value` is {expected[token, entry]:.4g}"
            )
        halves = [z.reshape(_TOKENS, 2, -1) for z in models]
        values, gradients = self.call(
            lambda: jax.vmap(in_parts, in_axes=1, axis_name="vocab")(halves)
        )
        joined = np.asarray(gradients).swapaxes(0, 1).reshape(_TOKENS, _ROWS)
        for by_parts, at_once in ((values[0], value), (values[1], value), (joined, gradient)):
            if not np.allclose(by_parts, at_once, rtol=_TOLERANCE, atol=_TOLERANCE * scale):
                raise self.refuse(
                    "a device that has a part of the vocabulary computes something else; sum over "
                    "it by logits.vocabulary.sum, and take its maximum by logits.vocabulary.max"
                )

    def states_term(self, term: StatesTerm) -> None:
        """Checks that each token has a rate, which depends on the states of this token alone."""
        y, velocity = jax.random.normal(jax.random.key(0), (2, 1, 3, 4))
        rate, pull_back = self.call(lambda: jax.vjp(term.rate, y, velocity))
        self.numbers(rate, (1, 3))
        gradients = np.asarray(pull_back(jnp.zeros((1, 3)).at[:, 1].set(1.0)))
        if not (gradients.any() and np.isfinite(gradients).all()):
            raise self.refuse("the gradient of its rate is zero or not finite")
        if gradients[:, :, [0, 2]].any():
            raise self.refuse("the rate of a token depends on other tokens")
        narrow = jax.ShapeDtypeStruct(y.shape, jnp.bfloat16)
        of_narrow = self.call(lambda: jax.eval_shape(term.rate, narrow, narrow))
        if of_narrow.dtype != rate.dtype:
            raise self.refuse(
                f"its rate of bfloat16 states is {of_narrow.dtype}; begin with "
                "y.astype(jnp.float32)"
            )

    def call(self, compute: Callable[[], Any]) -> Any:
        """What `compute` returns; an error names the term."""
        try:
            return compute()
        except Exception as error:  # another package's code may raise anything
            raise self.refuse(f"it can't be computed: {describe_foreign(error)}") from error

    def numbers(self, value: Array, shape: tuple[int, ...]) -> None:
        """Checks that each token has a finite float32 number."""
        if not hasattr(value, "dtype"):
            raise self.refuse(f"it returns {value!r:.60}, not an array")
        if (value.shape, value.dtype) != (shape, jnp.float32) or not np.isfinite(value).all():
            raise self.refuse(
                f"it returns {value.dtype}{list(value.shape)} where each of {shape[-1]} tokens has "
                f"a finite number, float32{list(shape)}"
            )


def _logits(axes: tuple[str, ...], models: list[Float[Array, "chunk v"]]) -> LogitsOfChunk:
    vocabulary = Vocabulary(_VOCABULARY, axes)
    normalisers = [vocabulary.normaliser(z) for z in models]
    return LogitsOfChunk(vocabulary, models, normalisers, jnp.array(_TARGETS))
