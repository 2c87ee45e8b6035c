"""The chunked loss equals the plain one, whatever the chunk and the mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import auto_mesh

from t5x_diffeq.training.losses import token_losses
from t5x_diffeq.training.partitioning import AXES, mesh_context

RNG = np.random.default_rng(0)
Y = jnp.asarray(RNG.normal(size=(8, 5, 16)), jnp.float32)
HEAD = jnp.asarray(RNG.normal(size=(128, 16)), jnp.float32)
TARGETS = jnp.asarray(RNG.integers(0, 100, (8, 5)), jnp.int32)
RULES = (("batch", ("data", "fsdp")), ("vocab", "tensor"), ("embed", "fsdp"))


def plain_losses(y, head):
    logits = (y @ head.T)[..., :100]
    normaliser = jax.nn.logsumexp(logits, axis=-1)
    chosen = jnp.take_along_axis(logits, TARGETS[..., None], -1)[..., 0]
    return normaliser - chosen, normaliser


def make_chunked_losses(chunk):
    return lambda y, head: token_losses(y, head, TARGETS, vocab_size=100, chunk=chunk)


def value_and_gradients(losses):
    def total(y, head):
        loss, normaliser = losses(y, head)
        return (loss * jnp.arange(40.0).reshape(8, 5) + 0.1 * normaliser**2).sum()

    return jax.jit(losses)(Y, HEAD), jax.jit(jax.grad(total, argnums=(0, 1)))(Y, HEAD)


EXPECTED = value_and_gradients(plain_losses)


def close(found):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(EXPECTED), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * float(jnp.abs(b).max()))


@pytest.mark.parametrize("chunk", [1, 7, 40, 1000])
def test_chunks(chunk):
    close(value_and_gradients(make_chunked_losses(chunk)))


@pytest.mark.parametrize("shape", [(1, 8, 1, 1), (2, 2, 1, 2), (1, 1, 1, 8), (1, 2, 2, 2)])
def test_meshes(shape):
    mesh = auto_mesh(**dict(zip(AXES, shape, strict=True)))
    with mesh_context(mesh, RULES):
        close(value_and_gradients(make_chunked_losses(3)))


def test_logits_never_all_exist():
    """The compiled step's temporaries stay far below the logits' own size."""
    y, head = jnp.zeros((4, 512, 16)), jnp.zeros((4096, 16))
    targets = jnp.zeros((4, 512), jnp.int32)

    def loss(y, head):
        return token_losses(y, head, targets, vocab_size=4096, chunk=128)[0].sum()

    compiled = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(y, head).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 0.5 * 4 * 512 * 4096 * 4
