"""The gradient of a step: microbatches change nothing, and its norm is its norm."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_close, auto_mesh, setup_of, train_config
from small_models import EVERY_OPTION, random_params, uneven_batch
from small_models import small as small_model

from t5x_diffeq.system.errors import InputError
from t5x_diffeq.training.partitioning import mesh_context
from t5x_diffeq.training.step import make_gradient

BATCH = uneven_batch(np.random.default_rng(0), 16)
RULES = (("batch", "fsdp"), ("embed", "fsdp"), ("vocab", "tensor"), ("mlp", "tensor"))
HEADS_TOO = (*RULES, ("heads", "tensor"))


def gradient(microbatches, mesh=None, depths=None, rules=RULES, **changes):
    model = small_model(**changes)
    params = random_params(model)
    of_batch = make_gradient(
        model,
        lambda part: True,
        train_config(microbatches=microbatches, loss_chunk=32, z_loss=1e-2),
        depths,
    )
    arguments = params, BATCH, jax.random.key(0)
    if mesh is None:
        found, norm, means, *_ = jax.jit(of_batch)(*arguments)
    else:
        with mesh_context(mesh, rules):
            found, norm, means, *_ = jax.jit(of_batch)(*arguments)
    return found, norm, means["loss"]


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["time_dependent", "per_layer"])
def test_microbatches_change_nothing(weights):
    expected, norm, loss = gradient(1, weights=weights)
    for microbatches in (2, 8):
        found = gradient(microbatches, weights=weights)
        np.testing.assert_allclose(found[1:], (norm, loss), rtol=1e-5)
        assert_close(found[0], expected)


@pytest.mark.slow
def test_it_is_the_gradient_of_the_loss():
    model, params = small_model(), random_params(small_model())
    found, _, loss = gradient(1)

    def whole(params):
        logits = model.apply({"params": params}, BATCH["inputs"])[..., :50]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, BATCH["targets"])
        squares = jnp.square(jax.nn.logsumexp(logits, -1))
        return ((losses + 1e-2 * squares) * BATCH["mask"]).sum() / BATCH["mask"].sum()

    value, expected = jax.jit(jax.value_and_grad(whole))(params)
    assert value > loss
    assert_close(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("microbatches", [1, 2])
def test_several_depths_have_the_mean_of_their_gradients(microbatches):
    parts = [gradient(1, num_steps=n) for n in (2, 3)]
    found, norm, loss = gradient(microbatches, depths=(2, 3))
    np.testing.assert_allclose(loss, np.mean([part[2] for part in parts]), rtol=1e-5)
    np.testing.assert_allclose(norm, optax.global_norm(found), rtol=1e-5)
    assert_close(found, jax.tree.map(lambda a, b: (a + b) / 2, parts[0][0], parts[1][0]))


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, EVERY_OPTION], ids=["default", "every option"])
def test_on_a_mesh(changes):
    mesh = auto_mesh(fsdp=4, tensor=2)
    expected, norm, loss = gradient(1, **changes)
    found = gradient(2, mesh, rules=HEADS_TOO, **changes)
    np.testing.assert_allclose(found[1:], (norm, loss), rtol=1e-5)
    assert_close(found[0], expected)


def test_a_batch_that_does_not_divide_names_its_numbers(small):
    small.train.microbatches = 3
    with pytest.raises(InputError, match=r"batch_size=8 is not divisible by train.microbatches=3"):
        setup_of(small)
