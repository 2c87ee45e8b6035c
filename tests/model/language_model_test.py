"""The whole model against plain NumPy, and what must be true of it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpy_model
import pytest
from small_models import LLAMA, SMALL, TOKENS, random_params, small

from t5x_diffeq.model.language_model import in_one_document
from t5x_diffeq.model.layers.array_types import Places
from t5x_diffeq.model.layers.norm import Norm
from t5x_diffeq.system.errors import InputError


def logits(model, params, tokens=TOKENS, **kwargs):
    return jax.jit(lambda p, t: model.apply({"params": p}, t, **kwargs))(params, tokens)


OFFICIAL_LLAMA = {**LLAMA, "mlp_input": "attention_norm", "norm_shift": True, "norm_eps": 1e-6}
BASELINE = {"weights": "per_layer", "scheme": "lie_trotter", "step_size": "1"}
FAMILIES = {
    "qwen2": {**LLAMA, "qkv_bias": True, "tied_head": True, "rope_theta": 1e6},
    "qwen3": {**LLAMA, **BASELINE, "qk_norm": "head", "head_dim": 6},
    "olmo2": {**LLAMA, "qk_norm": "projection", "norm_position": "after"},
    "gemma": {**LLAMA, "activation": "gelu", "embedding_scale": 4.0, "head_dim": 8},
    "llama3": {**LLAMA, "rope_scaling": ("llama3", 8.0, 1.0, 4.0, 16), "rope_theta": 50.0},
    "linear": {**LLAMA, "rope_scaling": ("linear", 2.0)},
    "yarn": {**LLAMA, "rope_scaling": ("yarn", 4.0, 2.0, 0.5, 16, 1.1), "head_dim": 12},
    "gpt from a long state": {"embedding_scale": 8.0, "position_scale": 8.0},
    "gpt with norms": {"qk_norm": "head", "norm_position": "after", "head_dim": 2},
}


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"activation": "relu"},
        {"time_embedding": "common"},
        {"time_basis": "legendre:4", "scheme": "heun", "attention_time_embed_dim": 5},
        {"weights": "per_layer", "scheme": "lie_trotter", "step_size": "1"},
        {"weights": "shared", "scheme": "strang", "step_size": "2.5/N"},
        {"scheme": "midpoint"},
        {"weights": "per_layer", "scheme": "rk4"},
        LLAMA,
        OFFICIAL_LLAMA,
        {**LLAMA, **BASELINE},
        *(pytest.param(changes, id=name) for name, changes in FAMILIES.items()),
    ],
    ids=lambda changes: "-".join(map(str, changes.values())) or "default",
)
def test_equals_numpy(changes):
    model = small(**changes)
    params = random_params(model)
    found = logits(model, params)
    in_float64 = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    for row, tokens in zip(found, np.asarray(TOKENS), strict=True):
        expected = numpy_model.logits(model.config, in_float64, tokens)
        np.testing.assert_allclose(row[:, :50], expected, atol=1e-4 * np.abs(expected).max())
        assert (row[:, 50:] < -1e38).all()  # the padding of the vocabulary


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["gpt", "llama"])
def test_causal_by_gradients(architecture):
    model = small(architecture=architecture)
    params = random_params(model)

    def output(y0, j):
        places = in_one_document(TOKENS[:1])
        weights = model.apply({"params": params}, method="weights")
        y, _ = model.apply({"params": params}, y0, places, weights, method="integrate")
        return y[0, j].sum()

    y0 = jnp.asarray(np.random.default_rng(1).normal(size=(1, 10, 16)), jnp.float32)
    for j in (0, 4, 9):
        sensitivity = jnp.abs(jax.grad(output)(y0, j)).sum((0, 2))
        assert (sensitivity[: j + 1] > 0).all()
        assert (sensitivity[j + 1 :] == 0).all()


@functools.cache
def gradient_with_dropout(remat, unroll=1, **changes):
    model = small(dropout_rate=0.1, remat=remat, scan_unroll=unroll, **changes)

    def loss(params):
        rngs = {"dropout": jax.random.key(3)}
        out = model.apply({"params": params}, TOKENS, deterministic=False, rngs=rngs)
        return jnp.square(out[..., :50]).mean()

    return jax.tree.leaves(jax.jit(jax.grad(loss))(random_params(model)))


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["dots", "full", "keep:mlp", "keep:qkv,attention"])
def test_remat_changes_nothing(remat):
    assert_equal_gradients(gradient_with_dropout(remat), gradient_with_dropout("none"))


def assert_equal_gradients(found, expected):
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * float(jnp.abs(b).max()))


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["none", "full"])
def test_unrolling_changes_nothing(remat):
    assert_equal_gradients(gradient_with_dropout(remat, 2), gradient_with_dropout("none"))


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["full", "keep:qkv,attention"])
def test_a_state_that_is_carried_row_by_row_changes_nothing(remat):
    by_row = gradient_with_dropout(remat, state_row_major=True)
    for a, b in zip(by_row, gradient_with_dropout(remat), strict=True):
        np.testing.assert_array_equal(a, b)


def test_the_state_is_carried_row_by_row_if_asked():
    def program(row_major):
        model = small(state_row_major=row_major)
        apply = functools.partial(model.apply, {"params": random_params(model)})
        return str(jax.make_jaxpr(apply)(TOKENS))

    assert "layout_constraint" in program(True) and "layout_constraint" not in program(False)


def test_barriers_stand_behind_norms_and_mlp_of_unrolled_steps():
    """Without them, XLA stores what the backward pass should compute again."""

    def barriers(unroll):
        model = small(remat="none", scan_unroll=unroll)
        apply = functools.partial(model.apply, {"params": random_params(model)})
        return str(jax.make_jaxpr(apply)(TOKENS)).count("optimization_barrier")

    assert barriers(1) == 0
    assert barriers(2) == 3


@pytest.mark.slow
def test_dropout():
    model = small(dropout_rate=0.5)
    params = random_params(model)

    def apply_dropout(key):
        rngs = {"dropout": jax.random.key(key)}
        return logits(model, params, deterministic=False, rngs=rngs)

    assert (apply_dropout(0) == apply_dropout(0)).all()
    assert (apply_dropout(0) != apply_dropout(1)).any()
    np.testing.assert_array_equal(logits(model, params), logits(small(), params))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_kv_heads": 2}, "num_kv_heads=2: gpt's q, k and v are one linear"),
        ({"architecture": "llama", "num_kv_heads": 3}, "num_heads=4 is not divisible by .*=3"),
        ({"architecture": "llama", "embed_dim": 12}, "heads of odd width"),
        (
            {"architecture": "llama", "activation": "relu"},
            "model.activation=relu with model.architecture=llama: it can be silu",
        ),
        ({"activation": "silu"}, "model.architecture=gpt: it can be gelu or relu"),
        ({"tied_head": True}, "model.tied_head=True with model.architecture=gpt: the key is"),
        ({"qkv_bias": True}, "model.qkv_bias=True with model.architecture=gpt"),
        ({"rope_theta": 5e5}, "model.rope_theta=500000.0 with model.architecture=gpt"),
        ({**LLAMA, "head_dim": 5}, "model.head_dim=5 is odd"),
        ({**LLAMA, "rope_scaling": ("ntk", 2.0)}, "the first entry can be linear, llama3, yarn"),
        (
            {"mlp_input": "attention_norm", "norm_position": "after"},
            "model.mlp_input=attention_norm with model.norm_position=after",
        ),
        (
            {"block": "t5x_diffeq.model.parallel_block:ParallelBlock", "norm_position": "after"},
            "model.norm_position=after with model.block=t5x_diffeq.model.parallel_block",
        ),
    ],
)
def test_bad_configs(changes, message):
    with pytest.raises(InputError, match=message):
        dataclasses.replace(SMALL, **changes)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["gpt", "llama"])
def test_packed_documents_are_as_if_alone(architecture):
    """One row of 4 + 6 tokens, and each document by itself, positions from 0."""
    model = small(architecture=architecture)
    params = random_params(model)
    segments = jnp.asarray([[0] * 4 + [1] * 6] * 2)
    positions = jnp.asarray([[*range(4), *range(6)]] * 2)

    def states(tokens, places=None):
        apply = jax.jit(
            lambda p, t, s: model.apply({"params": p}, t, None, s, method="state_and_head")[0]
        )
        return apply(params, tokens, places)

    packed = states(TOKENS, Places(positions, segments))
    np.testing.assert_allclose(packed[:, :4], states(TOKENS[:, :4]), atol=1e-5)
    np.testing.assert_allclose(packed[:, 4:], states(TOKENS[:, 4:]), atol=1e-5)
    assert np.abs(packed - states(TOKENS)).max() > 1e-2


def test_places_are_an_ordinary_named_tuple():
    places = Places(TOKENS, None, TOKENS + 1)
    assert [*places._asdict()] == ["positions", "segments", "order"] and len([*places]) == 3
    moved = places._replace(positions=places.order)
    assert moved.positions is moved.order is places.order


@pytest.mark.parametrize("centred", [True, False])
def test_a_norm_equals_numpy(centred):
    """LayerNorm, and RMSNorm, of what has a mean."""
    x = 3 + np.random.default_rng(0).standard_normal((2, 8)).astype(np.float32)
    norm = Norm(centred, False, 1e-5)
    found = norm.apply({"params": {"scale": jnp.ones(8)}}, jnp.asarray(x))
    y = x - x.mean(-1, keepdims=True) if centred else x
    expected = y / np.sqrt(np.square(y).mean(-1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(found, expected, atol=1e-5)
