"""Terms of other packages: what is minimised with them, and what is refused before a run."""

import re
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import ROOT, assert_close, train_config
from small_models import random_params, uneven_batch
from small_models import small as small_model

from examples.own_term import NAMES
from t5x_diffeq import LogitsTerm, StatesTerm
from t5x_diffeq.system.errors import InputError
from t5x_diffeq.training.step import make_gradient
from t5x_diffeq.training.term_checks import OTHERS, check_term, check_terms
from t5x_diffeq.training.terms import CrossEntropy, Distillation, VelocityPenalty, ZLoss

BATCH = uneven_batch(np.random.default_rng(0), 8)


def plain_entropy(model, params):
    logits = model.apply({"params": params}, BATCH["inputs"])[..., :50]
    log_q = jax.nn.log_softmax(logits)
    return -(jnp.exp(log_q) * log_q).sum(-1), log_q


def test_terms_of_another_package_are_minimised_and_reported():
    model = small_model(num_steps=2)
    params, mask = random_params(model), BATCH["mask"]

    def plain(params):
        entropies, log_q = plain_entropy(model, params)
        picked = jnp.take_along_axis(log_q, BATCH["targets"][..., None], -1)[..., 0]
        weights = model.apply({"params": params}, method="weights")
        y = model.apply({"params": params}, BATCH["inputs"], weights, method="trajectory")[:-1]
        sizes = (y**4).mean((0, -1))  # Euler's scheme reads the rate where a step begins
        loss, entropy, size = ((x * mask).sum() / mask.sum() for x in (-picked, entropies, sizes))
        return loss - 0.01 * entropy + 0.001 * size, {
            "loss": loss,
            "entropy": entropy,
            "size": size,
        }

    expected, means = jax.jit(jax.grad(plain, has_aux=True))(params)
    config = train_config(loss_chunk=32, terms=NAMES)
    found = jax.jit(make_gradient(model, lambda part: True, config))(
        params, BATCH, jax.random.key(0)
    )
    assert found.metrics.keys() == means.keys()
    for name, value in means.items():
        np.testing.assert_allclose(found.metrics[name], value, rtol=1e-5)
    assert_close(found.gradient, expected)


class Squares(LogitsTerm):
    """n^2 of the log-normaliser n."""

    name = "squares"

    def value(self, logits):
        return logits.normalisers[0] ** 2

    def pull_back(self, logits, d):
        return (2 * logits.normalisers[0] * d)[:, None] * jnp.exp(logits.log_probabilities(0))


class WithoutFactor(Squares):
    def pull_back(self, logits, d):
        return super().pull_back(logits, d) / 2


class Padded(Squares):
    def pull_back(self, logits, d):
        return super().pull_back(logits, d) + 1e-3


class Constant(Squares):
    def value(self, logits):
        return jnp.ones_like(logits.normalisers[0])


class OfThisPart(Squares):
    """A sum over what this device has of the vocabulary."""

    def value(self, logits):
        return jnp.exp(2 * logits.log_probabilities(0)).sum(-1)

    def pull_back(self, logits, d):
        q = jnp.exp(logits.log_probabilities(0))
        return 2 * d[:, None] * q * (q - (q * q).sum(-1)[:, None])


class OfAll(Squares):
    def value(self, logits):
        return logits.normalisers[0].mean()


class NotFinite(Squares):
    def value(self, logits):
        return jnp.log(logits.normalisers[0] - 1e3)


class Valueless(Squares):
    def value(self, logits):
        logits.normalisers[0].mean()


class FromTeacher(Squares):
    def value(self, logits):
        return logits.normalisers[1]


class Nameless(Squares):
    name = None


class Taken(Squares):
    name = "loss"


class Mixed(StatesTerm):
    name = "mixed"

    def rate(self, y, velocity):
        return jnp.square(y - y.mean(1, keepdims=True)).mean(-1)


class Unwidened(StatesTerm):
    name = "unwidened"

    def rate(self, y, velocity):
        return jnp.square(y).mean(-1)


class Flat(StatesTerm):
    name = "flat"

    def rate(self, y, velocity):
        return jnp.sign(y).mean(-1)


@dataclass(frozen=True)
class Narrow(StatesTerm):
    name = "narrow"
    power: int = 2

    def rate(self, y, velocity):
        return (y**self.power).mean(-1).astype(jnp.bfloat16)


@pytest.mark.parametrize(
    ("term", "message"),
    [
        (
            "WithoutFactor(weight=1.0)",
            r"they differ most by [\d.]+, at token \d \(d = -?[\d.]+\), entry \d \((no|the) target"
            r"\): `pull_back` gives -?[\d.]+, and JAX's gradient of `value` is -?[\d.]+$",
        ),
        ("Padded(weight=1.0)", "`pull_back` isn't the gradient"),
        ("Constant(weight=1.0)", "its value has no gradient"),
        ("OfThisPart(weight=1.0)", r"sum over it by logits\.vocabulary\.sum"),
        ("OfAll(weight=1.0)", r"returns float32\[\] where each of 5 tokens has a finite number"),
        ("NotFinite(weight=1.0)", r"each of 5 tokens has a finite number"),
        ("Valueless(weight=1.0)", r"(returns|value:) None"),
        ("FromTeacher(weight=1.0)", "can't be computed: IndexError"),
        ("Nameless(weight=1.0)", "its name is None; give its class a `name`"),
        ("Taken(weight=1.0)", "its name is 'loss'; .* other than loss, distillation"),
        ("Squares(weight=0)", "its weight is 0; give a finite number other than 0"),
        ("Squares(weight=1e400)", "its weight is inf; give a finite number other than 0"),
        ("Squares", r"'weight'; its own arguments are .*Squares\(weight=...\)"),
        ("Squares(wide=1)", r"can't be made: .*; its own arguments are .*Squares\(weight=...\)"),
        ("Mixed(weight=1.0)", "the rate of a token depends on other tokens"),
        ("Flat(weight=1.0)", "the gradient of its rate is zero"),
        ("Unwidened(weight=1.0)", r"of bfloat16 states is bfloat16; begin with y\.astype\(jnp\.f"),
        ("Narrow(weight=1.0)", r"returns bfloat16\[1, 3\] where each of 3 tokens"),
        (
            "small_model",
            r"is not called, .* returns t5x_diffeq\..*LogitsTerm or t5x_diffeq\..*StatesTerm",
        ),
    ],
)
def test_what_is_refused_before_a_run(term, message):
    name = f"{__name__}:{term}"
    with pytest.raises(InputError, match=message) as raised:
        check_terms(train_config(terms=(name,)))
    assert str(raised.value).startswith(f"train.terms={name}")


def test_terms_that_are_right_are_taken():
    squares = f"{__name__}:Squares(weight=-2.0)"
    check_terms(train_config(terms=(squares, *NAMES)))
    with pytest.raises(InputError, match="its name is 'squares'"):
        check_terms(train_config(terms=(squares, squares)))


BUILT_IN = [CrossEntropy, Distillation, ZLoss, VelocityPenalty]


def test_a_term_has_no_name_that_a_run_reports_already():
    reported = re.findall(r"`train/(\w+)`", (ROOT / "docs" / "operating.md").read_text())
    assert {*reported, "spike"} == {*OTHERS, *(each.name for each in BUILT_IN)}


@pytest.mark.parametrize("term", BUILT_IN)
def test_the_terms_of_the_package_pass_the_same_checks(term):
    check_term(term(0.5), term.name, taken=(), has_teacher=True)


def test_a_term_may_read_a_teacher_where_there_is_one():
    check_term(Distillation(0.5), "distillation", taken=(), has_teacher=True)
    with pytest.raises(InputError, match=r"train\.distill_from"):
        check_term(Distillation(0.5), "distillation", taken=(), has_teacher=False)
