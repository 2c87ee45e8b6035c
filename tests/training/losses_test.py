"""The chunked loss equals the plain one, whatever the chunk and the mesh."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, auto_mesh

from t5x_diffeq.training.losses import losses_and_choices, sum_of_terms
from t5x_diffeq.training.partitioning import mesh_context
from t5x_diffeq.training.terms import CrossEntropy, Distillation, ZLoss

RNG = np.random.default_rng(0)
Y = jnp.asarray(RNG.normal(size=(8, 5, 16)), jnp.float32)
HEAD = jnp.asarray(RNG.normal(size=(128, 16)), jnp.float32)
TARGETS = jnp.asarray(RNG.integers(0, 100, (8, 5)), jnp.int32)
NAMED = ("data", "fsdp", "context", "tensor")  # axes of the meshes below
RULES = (("batch", ("data", "fsdp")), ("vocab", "tensor"), ("embed", "fsdp"))


def plain_losses(y, head):
    logits = (y @ head.T)[..., :100]
    normaliser = jax.nn.logsumexp(logits, axis=-1)
    chosen = jnp.take_along_axis(logits, TARGETS[..., None], -1)[..., 0]
    return normaliser - chosen, normaliser**2


WEIGHTS = jnp.arange(40.0).reshape(8, 5)
SIZES = {"vocab_size": 100}


def value_and_gradients_of_plain():
    def total(y, head):
        loss, square = plain_losses(y, head)
        return (WEIGHTS * (loss + 0.1 * square)).sum()

    return jax.jit(plain_losses)(Y, HEAD), jax.jit(jax.grad(total, argnums=(0, 1)))(Y, HEAD)


def value_and_gradients(chunk):
    """Of the losses of tokens, as evaluation and as training compute them."""

    def total(y, head):
        terms, model, half = (CrossEntropy(1.0), ZLoss(0.1)), (y, head), WEIGHTS / 2
        total, found = sum_of_terms(terms, model, None, TARGETS, half, chunk=chunk, **SIZES)
        return 2 * total, found  # what is minimised need not be the sum itself

    losses, _ = jax.jit(partial(losses_and_choices, targets=TARGETS, chunk=chunk, **SIZES))(Y, HEAD)
    gradients, of_tokens = jax.jit(jax.grad(total, argnums=(0, 1), has_aux=True))(Y, HEAD)
    np.testing.assert_allclose(losses, of_tokens[0], rtol=1e-6)
    return tuple(of_tokens), gradients


EXPECTED = value_and_gradients_of_plain()


@pytest.mark.parametrize("chunk", [1, 7, 40, 1000])
def test_chunks(chunk):
    assert_close(value_and_gradients(chunk), EXPECTED, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(1, 8, 1, 1), (2, 2, 1, 2), (1, 1, 1, 8), (1, 2, 2, 2)])
def test_meshes(shape):
    mesh = auto_mesh(**dict(zip(NAMED, shape, strict=True)))
    with mesh_context(mesh, RULES):
        assert_close(value_and_gradients(3), EXPECTED, 1e-5)


# --------------------------------------------------------------------------- with a teacher

TEACHER = (
    jnp.asarray(RNG.normal(size=(8, 5, 24)), jnp.float32),
    jnp.asarray(RNG.normal(size=(128, 24)), jnp.float32),
)


def log_softmax(y, head):
    """In float64, of the 100 tokens."""
    logits = np.einsum("bld,vd->blv", *(np.asarray(x, np.float64) for x in (y, head)))[..., :100]
    highest = logits.max(-1, keepdims=True)
    return logits - highest - np.log(np.exp(logits - highest).sum(-1, keepdims=True))


def plain_divergences():
    """KL(teacher || student) of each token, and the gradient of the `weighted` sum in NumPy."""
    theirs, ours = log_softmax(*TEACHER), log_softmax(Y, HEAD)
    divergences = (np.exp(theirs) * (theirs - ours)).sum(-1)
    d_logits = (np.exp(ours) - np.exp(theirs)) * np.arange(40.0).reshape(8, 5)[..., None]
    d_head = np.zeros(HEAD.shape)
    d_head[:100] = np.einsum("blv,bld->vd", d_logits, Y)
    return divergences, (d_logits @ np.asarray(HEAD)[:100], d_head)


def weighted(teacher, chunk):
    """The sum of the divergences, each weighted by its number, as a function of y and the head."""

    def total(y, head):
        return sum_of_terms(
            (Distillation(1.0),),
            (y, head),
            teacher,
            TARGETS,
            WEIGHTS,
            chunk=chunk,
            **SIZES,
        )

    return jax.jit(jax.grad(total, argnums=(0, 1), has_aux=True))


SHAPES = ((2, 2, 1, 2), (1, 1, 1, 8), (1, 8, 1, 1))


@pytest.mark.parametrize(
    ("chunk", "shape"),
    [(7, None), *(pytest.param(3, shape, marks=pytest.mark.slow) for shape in SHAPES)],
)
def test_divergences_and_their_gradient(chunk, shape):
    divergences, gradients = plain_divergences()
    if shape is None:
        found, values = weighted(TEACHER, chunk)(Y, HEAD)
    else:
        mesh = auto_mesh(**dict(zip(NAMED, shape, strict=True)))
        with mesh_context(mesh, RULES):
            found, values = weighted(TEACHER, chunk)(Y, HEAD)
    np.testing.assert_allclose(values[0], divergences, atol=1e-5 * divergences.max())
    for a, b in zip(found, gradients, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max())


def test_a_teacher_gets_no_gradient():
    def total(*teacher):
        terms = CrossEntropy(1.0), ZLoss(1.0), Distillation(1.0)
        return sum_of_terms(terms, (Y, HEAD), teacher, TARGETS, WEIGHTS, chunk=7, **SIZES)[0]

    found = jax.jit(jax.grad(total, argnums=(0, 1)))(*TEACHER)
    jax.tree.map(lambda d: np.testing.assert_array_equal(d, 0), found)


@pytest.mark.parametrize("with_teacher", [False, True])
def test_logits_never_all_exist(with_teacher):
    """The compiled step's temporaries stay far below the logits' own size."""
    y, head = jnp.zeros((4, 512, 16)), jnp.zeros((4096, 16))
    targets = jnp.zeros((4, 512), jnp.int32)
    sizes = {"vocab_size": 4096, "chunk": 128}

    def loss(y, head):
        teacher = (y + 1, head) if with_teacher else None
        total, _ = sum_of_terms(
            (CrossEntropy(1.0), ZLoss(1.0), *[Distillation(1.0)] * with_teacher),
            (y, head),
            teacher,
            targets,
            jnp.ones(targets.shape),
            **sizes,
        )
        return total

    compiled = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(y, head).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 0.5 * 4 * 512 * 4096 * 4
