"""The gradient of a step with weight sources outside the package: its norm, its loss by depth."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_close, auto_mesh, train_config
from own_sources import OWN
from small_models import random_params, uneven_batch
from small_models import small as small_model

from t5x_diffeq.model.language_model import LanguageModel
from t5x_diffeq.model.ode.sources import SOURCES
from t5x_diffeq.training.objective import batch_losses
from t5x_diffeq.training.partitioning import mesh_context
from t5x_diffeq.training.step import make_gradient

BATCH = uneven_batch(np.random.default_rng(0), 16)
RULES = (("batch", "fsdp"), ("embed", "fsdp"))
SETTINGS = {
    **OWN,
    **{name: (name, 2, () if name == "per_layer" else (1, 2)) for name in SOURCES},
}


@pytest.mark.slow
@pytest.mark.in_turns
@pytest.mark.parametrize("name", SETTINGS)
def test_the_loss_and_the_norm_of_its_gradient(name):
    """At each depth the loss is that of a model of so many steps, as evaluation makes it."""
    weights, num_steps, depths = SETTINGS[name]
    model = small_model(weights=weights, num_steps=num_steps)
    params = random_params(model)
    models = [LanguageModel(replace(model.config, num_steps=n)) for n in depths or (num_steps,)]

    def mean_loss(params):
        losses = jnp.stack([batch_losses(each, params, BATCH, chunk=32) for each in models])
        return (losses.mean(0) * BATCH["mask"]).sum() / BATCH["mask"].sum()

    loss, expected = jax.jit(jax.value_and_grad(mean_loss))(params)
    train = train_config(microbatches=2, loss_chunk=32)
    gradient = make_gradient(model, lambda part: True, train, depths or None)
    with mesh_context(auto_mesh(fsdp=8), RULES):
        found = jax.jit(gradient)(params, BATCH, jax.random.key(0))
    np.testing.assert_allclose(found.metrics["loss"], loss, rtol=1e-6)
    np.testing.assert_allclose(found.norm, optax.global_norm(expected), rtol=1e-5)
    assert_close(found.gradient, expected)
