"""Training on random grids."""

import signal
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import metrics_of, send_after, small_config, train_keys
from small_models import LLAMA, TOKENS, random_params, small

from t5x_diffeq.models.language_model import LanguageModel, in_one_document
from t5x_diffeq.models.sub_fields import vector_field
from t5x_diffeq.ode.schemes import find_scheme, grid
from t5x_diffeq.runtime.config import Config
from t5x_diffeq.runtime.errors import InputError
from t5x_diffeq.training.gradient import make_gradient
from t5x_diffeq.training.jitter import MovedGrid, check_jitter, move_grid
from t5x_diffeq.verbs.train import train

KEY = jax.random.key(3)
BATCH = {
    "inputs": TOKENS[:, :-1],
    "targets": TOKENS[:, 1:],
    "mask": jnp.asarray(np.random.default_rng(0).random((2, 9)), jnp.float32),
}


@pytest.mark.parametrize("jitter", [0.5, 1.0])
def test_the_ends_of_steps_move_and_their_lengths_follow(jitter):
    drawn = [move_grid(grid("euler", 4), jitter, jax.random.key(n)) for n in range(200)]
    times, stretch = (np.stack(values) for values in zip(*drawn, strict=True))
    away = 4 * times - np.arange(1, 5)
    assert (times[:, -1] == 1).all()
    assert (np.abs(away) <= jitter / 2 + 1e-6).all()
    np.testing.assert_allclose(away.mean(0), 0, atol=0.1 * jitter)
    assert away[:, :-1].std(0) == pytest.approx(np.full(3, jitter / 12**0.5), rel=0.1)
    np.testing.assert_allclose(stretch, 4 * np.diff(times, prepend=0), atol=1e-5)
    np.testing.assert_allclose(stretch.mean(1), 1, atol=1e-6)


def test_nodes_stay_where_they_are_within_their_steps():
    moved = move_grid(grid("rk4", 3), 1.0, KEY)
    left, middle, right = moved.times.reshape(3, 3).T
    np.testing.assert_allclose(middle, (left + right) / 2, atol=1e-6)
    np.testing.assert_allclose(right[:-1], left[1:], atol=1e-6)
    np.testing.assert_allclose(moved.stretch, np.repeat(3 * (right - left), 3), atol=1e-5)
    still = MovedGrid(grid("rk4", 3).reshape(-1), np.ones(9))
    agree(move_grid(grid("rk4", 3), 0.0, KEY), still)


def gradient(model, params, jitter, microbatches=1):
    keys = train_keys(jitter=jitter, microbatches=microbatches)
    of_batch = make_gradient(model, lambda part: True, keys)
    return jax.jit(of_batch)(params, BATCH, KEY)


def agree(found, expected):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5 * np.abs(b).max() + 1e-9),
        found,
        expected,
    )


def unequal_steps(model, params, scheme, times):
    """y(1) on a grid of unequal steps, by the textbook, and the loss."""
    weights = model.apply(
        {"params": params}, jnp.asarray(times.reshape(-1)), method=LanguageModel.weights
    )
    places = in_one_document(BATCH["inputs"])
    field = vector_field(model.config, places, deterministic=True)(None)
    y = model.apply({"params": params}, BATCH["inputs"], places, method=LanguageModel.embed)
    for n, step in enumerate(times):
        own = range(n * len(step), (n + 1) * len(step))
        W = tuple(jax.tree.map(lambda w, i=i: w[i], weights) for i in own)
        h = step[-1] - (times[n - 1][-1] if n else 0)
        y = find_scheme(scheme).step(field, W, y, float(h))
    logits = model.apply({"params": params}, y, method=lambda m, y: m.logits(m.normalise(y)))
    losses = optax.softmax_cross_entropy_with_integer_labels(logits[..., :50], BATCH["targets"])
    return (losses * BATCH["mask"]).sum() / BATCH["mask"].sum()


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"scheme": "euler"},
        pytest.param({"scheme": "heun", **LLAMA, "norm_position": "after"}, marks=pytest.mark.slow),
    ],
    ids=["euler", "heun"],
)
def test_the_gradient_is_that_of_unequal_steps(changes):
    model = small(time_basis="chebyshev:4", **changes)
    params = random_params(model)
    times = np.asarray(move_grid(grid(changes["scheme"], 3), 1.0, KEY).times).reshape(3, -1)
    of_grid = partial(unequal_steps, model, scheme=changes["scheme"], times=times)
    value, expected = jax.jit(jax.value_and_grad(of_grid))(params)
    found = gradient(model, params, 1.0)
    np.testing.assert_allclose(found.means["loss"], value, rtol=1e-5)
    agree(found.gradient, expected)
    np.testing.assert_allclose(found.norm, optax.global_norm(expected), rtol=1e-5)
    assert abs(value - gradient(model, params, 0.0).means["loss"]) > 1e-4


@pytest.mark.slow
def test_microbatches_share_the_times():
    model = small(time_basis="splines:4")
    params = random_params(model)
    agree(gradient(model, params, 0.7, microbatches=2)[:3], gradient(model, params, 0.7)[:3])


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"model.scheme": "leapfrog"}, r"model.scheme=leapfrog needs equal ones"),
        ({"train.depths": (1, 2)}, r"train.depths=\(1, 2\) draws several; leave one"),
        ({"model.weights": "shared"}, r"model.weights=shared has no W"),
        ({"optimizer.moments": "factored"}, r"moments=factored keeps gradients; take int8"),
    ],
    ids=str,
)
def test_what_it_needs(small, keys, message):
    small.update_from_flattened_dict({"train.jitter": 0.5, **keys})
    with pytest.raises(InputError, match=message):
        check_jitter(Config.of(small))


@pytest.mark.slow
def test_training_resumes_bit_for_bit(text, tmp_path, monkeypatch):
    config = small_config(text)
    config.model.time_basis = "chebyshev:3"
    config.mesh.fsdp = 1  # then the compiled step is kept for the next run
    config.train.update(jitter=1.0, eval_batches=2)
    assert train(Config.of(config), tmp_path / "whole") == 0
    with monkeypatch.context() as patch:
        send_after(patch, signal.SIGTERM, steps=2)
        assert train(Config.of(config), tmp_path / "stopped") == 42
    assert train(Config.of(config), tmp_path / "stopped") == 0
    assert metrics_of(tmp_path / "stopped") == metrics_of(tmp_path / "whole")
