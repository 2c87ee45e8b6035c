"""What decays, what is scaled, and the schedule."""

import jax
import jax.numpy as jnp
import pytest
from flax.traverse_util import flatten_dict
from small_models import SMALL

from t5x_diffeq.layers.parameter import is_parameter
from t5x_diffeq.models.language_model import LanguageModel
from t5x_diffeq.runtime.config import Config, OptimizerKeys
from t5x_diffeq.training.optimizer import learning_rate_schedule, make_optimizer
from t5x_diffeq.training.partitioning import unbox
from t5x_diffeq.training.state import declared_params


def updates(optimizer, gradient):
    """The update of every parameter, all 1, at learning rate 1."""
    declared = declared_params(LanguageModel(SMALL))
    transform = make_optimizer(OptimizerKeys(**optimizer), declared, lambda step: 1.0)
    params = jax.tree.map(lambda x: jnp.ones(x.shape), unbox(declared))
    gradients = jax.tree.map(lambda x: jnp.full(x.shape, gradient), params)
    norm = jnp.float32(0.5)
    found = jax.jit(lambda g, p: transform.update(g, transform.init(p), p, norm=norm)[0])(
        gradients, params
    )
    return declared, flatten_dict(found, sep="/")


@pytest.mark.parametrize(
    ("decay", "decayed"),
    [
        ("embeddings", {"token_embedding/table", "position_embedding/table"}),
        ("kernels", {"source/mlp.up/kernel", "source/mlp.up/kernel_base", "token_embedding/table"}),
        ("all", {"source/mlp.up/bias", "final_norm/scale", "source/mlp_norm/shift"}),
    ],
)
def test_decay(small, decay, decayed):
    small.optimizer.decay = decay
    _, found = updates(small.optimizer, gradient=0.0)
    moved = {name for name, update in found.items() if (update != 0).all()}
    assert decayed <= moved
    spared = {"source/mlp.up/time_embedding/hidden_bias", "final_norm/scale"}
    assert decay == "all" or not spared & moved
    assert decay != "embeddings" or moved == decayed


def test_steps_are_scaled_by_their_multipliers(small):
    small.optimizer.weight_decay = 0.0
    declared, found = updates(small.optimizer, gradient=1e-3)
    boxes = flatten_dict(declared, is_leaf=lambda _, x: is_parameter(x), sep="/")
    for name, update in found.items():
        expected = -boxes[name].step_multiplier
        assert float(update.ravel()[0]) == pytest.approx(expected, rel=1e-3), name
    assert boxes["source/mlp.up/kernel"].step_multiplier == 0.5 / SMALL.time_embed_dim
    assert boxes["source/mlp.up/kernel_base"].step_multiplier == 0.5


def test_schedule(small):
    small.optimizer.update(learning_rate=1.0, warmup_fraction=0.1, min_lr_ratio=0.1)
    rate = learning_rate_schedule(Config.of(small).optimizer, 100)
    assert 0 < float(rate(0)) < float(rate(5)) < float(rate(10)) == 1
    assert float(rate(55)) == pytest.approx(0.55, abs=0.01)
    assert float(rate(100)) == pytest.approx(0.1)
