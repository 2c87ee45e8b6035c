"""In bfloat16 every leaf of the gradient is that of float32, whatever a token's count."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from helpers import auto_mesh, train_config
from small_models import TOKENS, small

from t5x_diffeq.model.adaptive import Adaptive, solve_adaptively
from t5x_diffeq.model.language_model import in_one_document
from t5x_diffeq.model.layers.attention_kernels import splash_attention
from t5x_diffeq.model.layers.embedding import Embedding
from t5x_diffeq.model.layers.linear import Linear
from t5x_diffeq.model.ode.integrate import integrate
from t5x_diffeq.model.ode.solvers import VectorField
from t5x_diffeq.system.errors import InputError
from t5x_diffeq.training.losses import sum_of_terms
from t5x_diffeq.training.partitioning import mesh_context, unbox
from t5x_diffeq.training.step import make_gradient
from t5x_diffeq.training.terms import ZLoss

SHAPES = {
    "num_steps": 4,
    "embed_dim": 32,
    "num_heads": 2,
    "mlp_dim": 64,
    "time_embed_dim": 6,
    "vocab_size": 120,
    "max_length": 64,
}
BASELINE = {"weights": "per_layer", "scheme": "lie_trotter", "step_size": "1"}
SOURCES = {"time_dependent": {}, "shared": {"weights": "shared"}, "per_layer": BASELINE}
NAMED = ("data", "fsdp", "context", "tensor")  # axes of the meshes below
RULES = (
    ("batch", ("data", "fsdp")),
    ("embed", "fsdp"),
    ("vocab", "tensor"),
    ("heads", "tensor"),
    ("mlp", "tensor"),
)
TOLERANCE = 0.02  # norm of the difference over norm of the reference


def batch(tokens):
    tokens = jnp.asarray(tokens, jnp.int32)
    mask = jnp.ones((len(tokens), tokens.shape[1] - 1), jnp.float32)
    return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:], "mask": mask}


def batches():
    """4096 tokens each: of Zipf's counts, the first 770 of them; and one token, 3 in 4 times."""
    rng = np.random.default_rng(0)
    counts = 1 / np.arange(1, 121)
    zipf = rng.choice(120, p=counts / counts.sum(), size=(64, 65))
    repeated = np.where(rng.random((64, 65)) < 0.75, 7, zipf)
    return {"zipf": batch(zipf), "repeated": batch(repeated)}


BATCHES = batches()


@functools.cache
def gradients(dtype, architecture, source, microbatches=1, mesh=None, **changes):
    """The gradient on each batch, by leaf."""
    model = small(**SHAPES, **SOURCES[source], architecture=architecture, dtype=dtype, **changes)
    init = jax.jit(model.init)
    params = unbox(init(jax.random.key(1), BATCHES["zipf"]["inputs"][:1])["params"])
    rng = np.random.default_rng(0)  # no leaf stays zero, for then others have no gradient
    params = jax.tree.map(
        lambda x: x + 0.02 * jnp.asarray(rng.normal(size=x.shape), x.dtype), params
    )
    of_batch = make_gradient(
        model, lambda part: True, train_config(microbatches=microbatches, loss_chunk=256)
    )
    key = jax.random.key(0)
    if mesh is None:
        compiled = jax.jit(of_batch)
        found = {name: compiled(params, each, key) for name, each in BATCHES.items()}
    else:
        devices = auto_mesh(**dict(zip(NAMED, mesh, strict=True)))
        with mesh_context(devices, RULES):
            compiled = jax.jit(of_batch)
            found = {name: compiled(params, each, key) for name, each in BATCHES.items()}
    return {
        (name, *path): np.asarray(leaf)
        for name, (gradient, *_) in found.items()
        for path, leaf in flatten_dict(gradient).items()
    }


def errors(found, expected):
    return {
        "/".join(path): float(np.linalg.norm(found[path] - leaf) / np.linalg.norm(leaf))
        for path, leaf in expected.items()
        if leaf.any() or found[path].any()
    }


def assert_close(found, expected):
    worst = {leaf: error for leaf, error in errors(found, expected).items() if error > TOLERANCE}
    assert not worst


@pytest.mark.slow
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("architecture", ["gpt", "llama"])
def test_every_leaf_of_the_gradient(architecture, source):
    expected = gradients("float32", architecture, source)
    assert_close(gradients("bfloat16", architecture, source), expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "source"),
    [("gpt", "time_dependent"), ("llama", "shared"), ("gpt", "per_layer")],
)
def test_every_leaf_on_a_mesh_in_microbatches(architecture, source):
    found = gradients("bfloat16", architecture, source, microbatches=2, mesh=(1, 2, 1, 2))
    assert_close(found, gradients("float32", architecture, source))


def ones(*shape):
    return jnp.ones(shape, jnp.bfloat16)


def test_a_row_of_an_embedding_counts_each_use():
    layer = Embedding(4, 8, dtype=jnp.bfloat16)
    tokens = jnp.full((3, 1000), 2)
    params = jax.tree.map(jnp.ones_like, unbox(layer.init(jax.random.key(0), tokens)))
    gradient = jax.grad(lambda p: layer.apply(p, tokens).sum())(params)["params"]["table"]
    np.testing.assert_array_equal(gradient, np.outer([0, 0, 3000, 0], np.ones(8)))


def test_devices_exchange_an_embedding_in_16_bits():
    """The table is rounded first, and then gathered along its width."""
    layer = Embedding(128, 16, dtype=jnp.bfloat16)
    params = {"params": {"table": jnp.ones((128, 16))}}
    mesh = auto_mesh(data=1, fsdp=2, tensor=2)
    with mesh_context(mesh, RULES):
        traced = jax.make_jaxpr(layer.apply)(params, jnp.zeros((4, 8), jnp.int32))
    constrained = re.findall(r"(\w+)\[128,16\] = sharding_constraint", str(traced))
    assert constrained == ["bf16"]


def test_a_bias_counts_each_token():
    layer = Linear((4, 8), (None, None), use_bias=True, dtype=jnp.bfloat16)
    params = unbox(layer.init(jax.random.key(0), ones(1, 4)))
    gradient = jax.grad(lambda p: layer.apply(p, ones(1001, 4)).astype(jnp.float32).sum())(params)
    np.testing.assert_array_equal(gradient["params"]["bias"], 1001)


def test_logits_are_summed_in_float32():
    """So is the gradient of the head, over tokens and chunks of them."""
    states, head = ones(1, 1002, 301), jnp.ones((2, 301))
    targets = jnp.zeros((1, 1002), jnp.int32)

    def squares(states, head):  # of normalisers n
        return sum_of_terms(
            (ZLoss(1.0),),
            (states, head),
            None,
            targets,
            jnp.ones(targets.shape),
            vocab_size=2,
            chunk=334,
        )

    (d_states, d_head), (values,) = jax.grad(squares, argnums=(0, 1), has_aux=True)(states, head)
    n = 301 + np.log(2)
    np.testing.assert_allclose(values, n**2, rtol=1e-6)
    assert d_states.dtype == jnp.bfloat16
    np.testing.assert_allclose(d_head, 2 * n * 501, rtol=2e-3)  # 2 n / 2 is rounded to bfloat16


def test_splash_rounds_queries_once():
    """Its division by sqrt(G) comes before the rounding of queries that are still float32."""
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(1, 128, 1, 128)), jnp.float32) for _ in range(3))
    k, v = (x.astype(jnp.bfloat16) for x in (8 * k, v))
    expected = splash_attention(q, *(x.astype(jnp.float32) for x in (k, v)), interpret=True)

    def error(q):
        found = splash_attention(q, k, v, interpret=True)
        return np.linalg.norm(found.astype(jnp.float32) - expected)

    assert error(q) < 0.9 * error(q.astype(jnp.bfloat16))


def test_checkpoints_are_kept_in_16_bits():
    def field(args):
        f = VectorField(lambda W, y: W["w"] * jnp.sin(y), lambda W, y: W["w"] * jnp.cos(y))
        return lambda key: f

    def residuals(kept_dtype):
        y = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 5)), jnp.float32)
        _, pull_back = jax.vjp(
            lambda y, w: integrate(
                field,
                {"w": w},
                y,
                scheme="euler",
                num_steps=7,
                step_size=1 / 7,
                remat="full",
                kept_dtype=kept_dtype,
            ),
            y,
            jnp.linspace(0.5, 1, 7),
        )
        kept = [x for x in jax.tree.leaves(pull_back) if x.shape == (7, 2, 3, 5)]
        return [x.dtype for x in kept], pull_back(jnp.ones_like(y))

    (wide, exact), (narrow, found) = residuals(jnp.float32), residuals(jnp.bfloat16)
    assert (wide, narrow) == ([jnp.float32], [jnp.bfloat16])
    for a, b in zip(found, exact, strict=True):
        assert 0 < np.linalg.norm(a - b) < 0.01 * np.linalg.norm(b)


def test_a_compiled_integration_has_a_gradient():
    """What the field reads beside weights and state is an argument, which no step captures."""

    def total(w, y, places):
        def field(places):
            f = VectorField(lambda W, y: W * jnp.sin(y + places), lambda W, y: W * jnp.cos(y))
            return lambda key: f

        grid = {"scheme": "euler", "num_steps": 4, "step_size": 1 / 4}
        return integrate(field, w, y, places, **grid, remat="full", kept_dtype=jnp.bfloat16).sum()

    arguments = jnp.ones(4), jnp.ones((2, 3)), jnp.arange(3)
    inside, outside = jax.grad(jax.jit(total)), jax.jit(jax.grad(total))
    np.testing.assert_allclose(inside(*arguments), outside(*arguments), rtol=1e-6)


def test_the_state_is_float32_wherever_it_is_integrated():
    model = small(weights="shared", dtype="bfloat16")
    params = jax.eval_shape(lambda: unbox(model.init(jax.random.key(0), TOKENS)["params"]))
    tokens, places = TOKENS[:, :1], in_one_document(TOKENS[:, :1])

    def extend(params):
        weights = model.apply({"params": params}, method="merged_weights_by_step")
        given = tokens, places, jnp.ones(tokens.shape, bool), weights, model.empty_caches(2, 10)
        return model.apply({"params": params}, *given, method="extend")

    def integrate(params):
        y = model.apply({"params": params}, TOKENS, in_one_document(TOKENS), method="embed")
        weights = model.apply({"params": params}, method="weights")
        return model.apply(
            {"params": params}, y, in_one_document(TOKENS), weights, method="integrate"
        )

    assert jax.eval_shape(integrate, params)[0].dtype == jnp.float32
    solved = jax.eval_shape(lambda p: solve_adaptively(model, p, TOKENS, Adaptive()), params)
    assert solved.y.dtype == jnp.float32
    y, (cache, *_) = jax.eval_shape(extend, params)
    assert {y.dtype, cache["keys"].dtype} == {jnp.dtype(jnp.bfloat16)}  # activations stay narrow


def test_a_state_narrower_than_the_computation_is_refused():
    with pytest.raises(InputError, match=r"model.state_dtype=bfloat16 with model.dtype=float32"):
        small(state_dtype="bfloat16")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "source"), [("llama", "time_dependent"), ("gpt", "per_layer")]
)
def test_every_leaf_with_products_in_fp8(architecture, source):
    """Operands have 4 significant bits, so a product is off by some percent, on a mesh too."""
    keys = {"products": "fp8", "remat": "keep:qkv,attention,mlp,fp8"}
    found = gradients("bfloat16", architecture, source, **keys)
    off = errors(found, gradients("float32", architecture, source))
    assert 0.01 < max(off.values()) < 0.15, off
    on_mesh = gradients("bfloat16", architecture, source, mesh=(1, 2, 1, 2), **keys)
    assert max(errors(on_mesh, found).values()) < 0.1


def test_products_in_fp8_of_float32_are_refused():
    with pytest.raises(InputError, match=r"model.products=fp8 with model.dtype=float32"):
        small(products="fp8")
    fp8 = small(products="fp8", dtype="bfloat16")
    assert fp8.config.in_float32() == small().config
