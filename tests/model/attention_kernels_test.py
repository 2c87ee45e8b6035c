"""The attention kernels agree, and the choice says why."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import auto_mesh
from jax.sharding import AbstractDevice, AbstractMesh, AxisType
from small_models import SMALL

from t5x_diffeq.model.language_model import LanguageModel
from t5x_diffeq.model.layers.array_types import Places
from t5x_diffeq.model.layers.attention_kernels import (
    causal_attention,
    check_kernel,
    choose,
    splash_attention,
    splash_block,
    triton_attention,
)
from t5x_diffeq.system.errors import InputError
from t5x_diffeq.training.partitioning import mesh_context, unbox
from t5x_diffeq.training.placed_model import declared_params

RNG = np.random.default_rng(0)
SEGMENTS = jnp.asarray(np.sort(RNG.integers(0, 5, (4, 128)), axis=1), jnp.int32)


def qkv(heads, kv_heads, head_dim):
    shapes = [(4, 128, h, head_dim) for h in (heads, kv_heads, kv_heads)]
    return [jnp.asarray(RNG.normal(size=shape), jnp.float32) for shape in shapes]


@pytest.mark.slow
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(2, 2, 128), (4, 2, 16)])
def test_splash_equals_xla(heads, kv_heads, head_dim):
    inputs = qkv(heads, kv_heads, head_dim)
    expected = causal_attention(*inputs, "xla")
    np.testing.assert_allclose(splash_attention(*inputs, interpret=True), expected, atol=2e-5)

    def gradient(attend):
        return jax.grad(lambda q, k, v: jnp.sin(attend(q, k, v)).sum(), argnums=(0, 1, 2))(*inputs)

    found = gradient(lambda *x: splash_attention(*x, interpret=True))
    for a, b in zip(found, gradient(lambda *x: causal_attention(*x, "xla")), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)


@pytest.mark.parametrize("has_segments", [False, True])
def test_splash_is_lowered_for_a_tpu(has_segments):
    """Without one: the kernel's program is in the exported module, and no softmax beside it."""
    shape = jax.ShapeDtypeStruct((4, 128, 2, 64), jnp.bfloat16)
    segments = SEGMENTS if has_segments else None

    def loss(q, k, v):
        return causal_attention(q, k, v, "splash", segments).astype(jnp.float32).sum()

    step = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
    module = jax.export.export(step, platforms=["tpu"])(shape, shape, shape).mlir_module()
    assert module.count("tpu_custom_call") >= 2  # forward and backward
    assert "stablehlo.exponential" not in module


@pytest.mark.slow
@pytest.mark.parametrize(
    ("remat", "kernels"),
    [("full", 4), ("keep:mlp", 4), ("keep:attention", 3), ("keep:attention,qkv,mlp", 3)],
)
def test_what_is_kept_of_splash_is_not_computed_again(remat, kernels):
    """Forward, forward again, and backward; or forward and backward alone."""
    config = dataclasses.replace(SMALL, max_length=128, attention="splash", remat=remat)
    model = LanguageModel(config)
    tokens = jax.ShapeDtypeStruct((2, 128), jnp.int32)
    params = unbox(declared_params(model))
    step = jax.jit(jax.grad(lambda p, t: model.apply({"params": p}, t)[..., :50].sum()))
    module = jax.export.export(step, platforms=["tpu"])(params, tokens).mlir_module()
    assert module.count("tpu_custom_call") == kernels


@pytest.mark.parametrize(
    ("kernel", "length", "head_dim", "size"),
    [
        ("splash", 2048, 64, 1024),
        ("splash", 16384, 128, 1024),
        ("splash", 2048, 256, 512),
        ("splash:512", 8192, 128, 512),
        ("splash:512", 384, 128, 128),  # a text shorter than those of training
    ],
)
def test_blocks_follow_length_and_width(kernel, length, head_dim, size):
    assert splash_block(kernel, length, head_dim) == size


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        ("splash:100", "a multiple of 128, as in splash:512"),
        ("splash:1536", "the block doesn't divide the length, 2048"),
        ("xla:512", "splash alone takes a block"),
        ("cudnn", "set it to auto or splash"),
    ],
)
def test_what_attention_can_not_be(kernel, message):
    with pytest.raises(InputError, match=f"model.attention={kernel}.*{message}"):
        check_kernel(kernel, "tpu", "bfloat16", 128, 2048)


@pytest.mark.parametrize(
    ("arguments", "kernel", "reason"),
    [
        (("cpu", "float32", 64, 1024), "xla", "no other for cpu"),
        (("gpu", "bfloat16", 64, 1024), "cudnn", "cuDNN"),
        (("gpu", "bfloat16", 64, 1024, True), "triton", "takes the documents' numbers"),
        (("gpu", "bfloat16", 64, 1000, True), "cudnn", "with documents as a dense mask; Triton's"),
        (("gpu", "bfloat16", 8, 1024, True), "cudnn", "heads from 16 wide, not 1024 and 8"),
        (("gpu", "float32", 64, 1024), "xla", "takes 16-bit numbers, not float32"),
        (("gpu", "bfloat16", 256, 1024), "xla", "up to 128 wide here, in steps of 8, not 256"),
        (("gpu", "bfloat16", 256, 1024, False, 1, "9.0"), "cudnn", "cuDNN"),
        (("gpu", "bfloat16", 264, 1024, False, 1, "9.0"), "xla", "up to 256 wide here"),
        (("tpu", "bfloat16", 128, 2048), "splash", "flash attention; blocks of 1024"),
        (("tpu", "bfloat16", 128, 100), "xla", "divisible by 128, not 100"),
        (("tpu", "bfloat16", 64, 131_072, False, 8), "splash", "flash attention"),
        (("tpu", "bfloat16", 64, 1024, False, 8), "xla", "divisible by"),  # chunks of 64 tokens
        (("gpu", "bfloat16", 64, 4096, False, 2), "xla", "mesh.context=2"),
    ],
)
def test_choice(arguments, kernel, reason):
    found, why = choose(*arguments)
    assert found == kernel
    assert reason in why


@pytest.mark.slow
def test_segments_keep_to_themselves():
    """Attention over a row of documents is that over each of them alone, in every kernel."""
    q, k, v = qkv(4, 2, 16)
    expected = np.zeros(q.shape, np.float32)
    for row, segments in enumerate(np.asarray(SEGMENTS)):
        for number in np.unique(segments):
            own = np.flatnonzero(segments == number)
            part = (x[row : row + 1, own[0] : own[-1] + 1] for x in (q, k, v))
            expected[row, own] = causal_attention(*part, "xla")[0]
    found = causal_attention(q, k, v, "xla", SEGMENTS)
    np.testing.assert_allclose(found, expected, atol=2e-5)
    mesh = auto_mesh(fsdp=4, tensor=2)
    rules = (("batch", "fsdp"), ("heads", "tensor"), ("length", None), ("head_dim", None))
    with mesh_context(mesh, rules):
        splash = jax.jit(lambda *x: splash_attention(*x, interpret=True))(q, k, v, SEGMENTS)
    np.testing.assert_allclose(splash, expected, atol=2e-5)


# ---------------------------------------------------------------- in Triton


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "heads", "head_dim", "tolerance"),
    [("float32", (4, 2), 16, 1e-5), ("bfloat16", (4, 1), 64, 1e-2), ("float32", (2, 2), 80, 1e-5)],
)
def test_triton_equals_xla(dtype, heads, head_dim, tolerance):
    """Values and gradients, relative to the largest entry, of rows of several documents."""
    inputs = [x.astype(dtype) for x in qkv(*heads, head_dim)]
    d_out = jnp.asarray(RNG.normal(size=inputs[0].shape), dtype)

    def values_and_gradients(attend):
        out, pull_back = jax.vjp(lambda *x: attend(*x, segments=SEGMENTS), *inputs)
        return out, *pull_back(d_out)

    expected = values_and_gradients(partial(causal_attention, kernel="xla"))
    for a, b in zip(values_and_gradients(interpreted), expected, strict=True):
        assert a.dtype == b.dtype
        a, b = (np.asarray(x, np.float32) for x in (a, b))
        assert np.abs(a - b).max() < tolerance * np.abs(b).max()


interpreted = jax.jit(partial(triton_attention, interpret=True))


def test_triton_keeps_to_segments_on_a_mesh():
    q, k, v = qkv(4, 2, 16)
    rules = (("batch", "fsdp"), ("heads", "tensor"), ("length", None), ("head_dim", None))
    with mesh_context(auto_mesh(fsdp=2, tensor=2), rules):
        found = jax.jit(partial(triton_attention, interpret=True))(q, k, v, SEGMENTS)
    expected = causal_attention(q, k, v, "xla", SEGMENTS)
    np.testing.assert_allclose(found, expected, atol=2e-5)
    assert not np.allclose(found, causal_attention(q, k, v, "xla"), atol=1e-2)


@pytest.mark.slow
def test_a_model_with_triton_is_lowered_for_a_gpu():
    """Without one: forward, forward again, and backward with its sums; and no mask [L, L]."""
    changes = {"architecture": "llama", "num_kv_heads": 2, "dtype": "bfloat16", "remat": "full"}
    config = dataclasses.replace(SMALL, embed_dim=64, max_length=384, **changes)
    config, reason = dataclasses.replace(config, attention="auto").with_attention_for("gpu", True)
    assert config.attention == "triton"
    assert "takes the documents' numbers" in reason
    model = LanguageModel(config)
    tokens = jax.ShapeDtypeStruct((2, 384), jnp.int32)
    places = Places(tokens, tokens)

    def loss(p, tokens, places):
        weights = model.apply({"params": p}, method="weights")
        return model.apply({"params": p}, tokens, weights, places, method="hidden").sum()

    step = jax.jit(jax.grad(loss))
    # jax 0.12 lowers Triton's kernels for a kind of GPU.
    gpu = AbstractDevice("NVIDIA H100 80GB HBM3", None, platform="gpu")
    mesh = AbstractMesh((1,), ("data",), axis_types=(AxisType.Auto,), abstract_device=gpu)
    safe = [jax.export.DisabledSafetyCheck.custom_call("__gpu$xla.gpu.triton")]
    program = jax.export.export(step, platforms=["cuda"], disabled_checks=safe)
    with jax.sharding.use_abstract_mesh(mesh):
        module = program(unbox(declared_params(model)), tokens, places).mlir_module()
    assert module.count("custom_call @__gpu$xla.gpu.triton") == 4
    assert "384x384" not in module
