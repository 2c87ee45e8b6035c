"""Products in 8 bits: how exact they are, what their gradient is, and what they are not about."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import auto_mesh
from small_models import LLAMA, TOKENS, random_params, small

from t5x_diffeq.layers import quantization
from t5x_diffeq.layers.linear import Linear
from t5x_diffeq.layers.quantization import product, quantized
from t5x_diffeq.models.block import Block
from t5x_diffeq.models.language_model import in_one_document
from t5x_diffeq.models.sub_fields import kernels_not_quantized
from t5x_diffeq.runtime.errors import InputError
from t5x_diffeq.training.partitioning import mesh_context

pytest.importorskip("qwix", reason="qwix is not installed: pip install -e '.[quantization]'")
RNG = np.random.default_rng(0)
MIXTURE = "t5x_diffeq.blocks.mixture_of_experts:MixtureBlock(num_experts=2)"


def factors(dtype=jnp.float32):
    """x `[6, 4, 8]` and W `[4, 8, 3, 5]`, whose rows and columns differ in size by far."""
    x = RNG.normal(size=(6, 4, 8)) * np.logspace(-3, 3, 6)[:, None, None]
    W = RNG.normal(size=(4, 8, 3, 5)) * np.logspace(-2, 2, 5)
    return jnp.asarray(x, dtype), jnp.asarray(W, dtype)


def rounded(values, name, axes):
    """The values as the 8-bit type has them, in NumPy, with a scale for each vector over `axes`."""
    largest = np.abs(values).max(axes, keepdims=True)
    if name == "int8":
        scale = largest / 127.5
        return np.clip(np.round(values / scale), -127, 127) * scale
    scale = largest / 448
    return np.asarray(jnp.asarray(values / scale, jnp.float8_e4m3fn), np.float64) * scale


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_factors_are_rounded_by_token_and_by_output(name):
    x, W = (np.asarray(each, np.float64) for each in factors())
    expected = np.tensordot(rounded(x, name, (1, 2)), rounded(W, name, (0, 1)), 2)
    with quantized(name):
        found = product(jnp.float32(x), jnp.float32(W), 2)
    sizes = np.linalg.norm(x, axis=(1, 2))[:, None, None] * np.linalg.norm(W, axis=(0, 1))
    # A value that lies between two of the type may be rounded to either; of int8 the largest may
    # become 128 / 127.5 of itself, or 127 / 127.5.
    assert (np.abs(found - expected) / sizes).max() < 5e-3
    exact = np.tensordot(x, W, 2)
    error = (np.abs(found - exact) / sizes).max()
    assert {"int8": 1e-4, "fp8": 1e-3}[name] < error < {"int8": 1e-2, "fp8": 4e-2}[name]


@pytest.mark.parametrize("name", ["int8", "fp8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_gradient_is_that_of_the_product_itself(name, dtype):
    x, W = factors(dtype)
    dy = jnp.asarray(RNG.normal(size=(6, 3, 5)), dtype)
    y, pull_back = jax.vjp(lambda x, W: product(x, W, 2), x, W)
    with quantized(name):
        again, straight_through = jax.vjp(lambda x, W: product(x, W, 2), x, W)
        tangent = jax.jvp(lambda x: product(x, W, 2), (x,), (x,))[1]
    assert again.dtype == y.dtype == jnp.dtype(dtype)
    assert not np.array_equal(again, y)
    for found, expected in zip(straight_through(dy), pull_back(dy), strict=True):
        np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(tangent, y)


def products_in(function, *arguments):
    """How many products the function's program has of each type of factors."""
    text = jax.jit(function).lower(*arguments).as_text()
    found = re.findall(r"stablehlo\.dot_general .*: \(tensor<[\dx]*x(\w+)>", text)
    return {kind: found.count(kind) for kind in set(found)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind", "architecture", "kernels"),
    [("int8", "i8", LLAMA, 7), ("fp8", "f8E4M3FN", {"architecture": "gpt"}, 4)],
)
def test_only_products_with_kernels_are_quantised_and_only_forward(
    name, kind, architecture, kernels
):
    def loss(model):
        return lambda p: jnp.square(model.apply({"params": p}, TOKENS)[..., :50]).mean()

    plain, model = small(**architecture), small(quantization=name, **architecture)
    params = random_params(model)
    for of in (lambda f: f, jax.grad):
        before, after = (products_in(of(loss(each)), params) for each in (plain, model))
        # Of the others there are: scores, sums of values, the head, the hypernetwork; gradients.
        assert after == {kind: kernels, "f32": before["f32"] - kernels}


@pytest.mark.slow
def test_a_model_is_about_the_same():
    """Loss and gradient, in bfloat16, of the scan with recomputation, on a mesh."""
    rules = (("batch", "fsdp"), ("embed", "fsdp"), ("heads", "tensor"), ("mlp", "tensor"))
    tokens, found = jnp.tile(TOKENS, (2, 1)), {}
    for name in ("none", "int8"):
        model = small(quantization=name, dtype="bfloat16", remat="full", max_length=16)
        params = random_params(model, scale=0.1)

        def loss(p, model=model):
            return jnp.square(model.apply({"params": p}, tokens)[..., :50]).mean()

        with mesh_context(auto_mesh(fsdp=2, tensor=2), rules):
            found[name] = jax.jit(jax.value_and_grad(loss))(params)
    assert 1e-4 < difference(found["int8"][1], found["none"][1]) < 0.05
    assert difference(found["int8"][0], found["none"][0]) < 0.05


def difference(found, expected):
    """The norm of the difference of two trees over that of the second."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    squares = [(np.square(a - b).sum(), np.square(b).sum()) for a, b in pairs]
    return float(np.sqrt(np.divide(*np.sum(squares, axis=0))))


@pytest.mark.slow
def test_cached_generation_is_quantised_too():
    """The logits from keys and values in a cache are those of a forward pass over the tokens."""

    def logits(name, of):
        model = small(quantization=name, **LLAMA)
        return jax.jit(partial(of, model))({"params": random_params(model)})[..., :50]

    def whole(model, variables):
        return model.apply(variables, TOKENS)

    def cached(model, variables):
        weights = model.apply(variables, method="merged_weights_by_step")
        real, places = jnp.ones(TOKENS.shape, bool), in_one_document(TOKENS)
        arguments = (TOKENS, places, real, weights, model.empty_caches(*TOKENS.shape))
        y, _ = model.apply(variables, *arguments, method="extend")
        return model.apply(variables, y, method="logits")

    rounding = difference(logits("int8", whole), logits("none", whole))
    assert rounding > 1e-3
    # Sums in another order can round an activation to the neighbouring number.
    assert difference(logits("int8", cached), logits("int8", whole)) < rounding / 3


def test_in_float32_nothing_is_quantised():
    """As analysis and export compute."""
    assert small(quantization="int8").config.in_float32().quantization == "none"


class Bilinear(Block):
    """A block with linears of its own, none of which names a quantisation."""

    def setup(self):
        c = self.config
        shape, axes = (c.embed_dim, c.embed_dim), ("embed", None)
        self.mix, self.map = (Linear(shape, axes, dtype=c.compute_dtype) for _ in range(2))

    def f(self, y, places, deterministic=True):
        return self.mix(y)

    def g(self, y, deterministic=True):
        return self.map(y)


class Opposed(Bilinear):
    """A block that lets nothing be quantised."""

    def setup(self):
        shape, axes = (self.config.embed_dim,) * 2, ("embed", None)
        self.mix, self.map = (Linear(shape, axes, quantizable=False) for _ in range(2))


@pytest.mark.parametrize(
    ("block", "kinds", "left"),
    [
        (f"{__name__}:Bilinear", {"i8": 2}, []),
        (
            MIXTURE,
            {"i8": 2},
            ["experts/down", "experts/gate", "experts/up", "router/kernel"],
        ),
    ],
)
def test_blocks_of_ones_own(block, kinds, left):
    model = small(quantization="int8", block=block)
    assert sorted(kernels_not_quantized(model.config)) == left
    variables = {"params": random_params(model)}
    found = products_in(lambda v: model.apply(v, TOKENS), variables)
    assert {"i8": found["i8"]} == kinds


def test_a_block_without_quantisable_linears_is_refused():
    config = small(quantization="int8", block=f"{__name__}:Opposed").config
    with pytest.raises(
        InputError, match=r"model.quantization=int8: no linear of model.block=.*Opp"
    ):
        kernels_not_quantized(config)


def test_without_the_library(monkeypatch):
    monkeypatch.setattr(quantization.importlib.util, "find_spec", lambda name: None)
    message = r"model.quantization=fp8 needs the package qwix; pip install -e '.\[quantization\]'"
    with pytest.raises(InputError, match=message):
        small(quantization="fp8")
    small(quantization="none")
