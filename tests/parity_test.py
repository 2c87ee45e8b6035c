"""The official implementation's own numbers: arrays recorded from it, in tests/golden."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict
from small_models import GPT_ODE, LAYERS, gpt_params, load, pad_table

from t5x_diffeq.models.language_model import LanguageModel
from t5x_diffeq.ode.time_embedding import TimeEmbedding
from t5x_diffeq.ode.time_features import time_features
from t5x_diffeq.training.losses import token_losses

LLAMA = dataclasses.replace(
    GPT_ODE,
    architecture="llama",
    weights="per_layer",
    scheme="lie_trotter",
    step_size="1",
    mlp_dim=64,
)


def llama_params(arrays):
    stacked = "param/transformer.layers.stacked."
    names = {
        ("attention", "query", "kernel"): "self_attn.q_proj.weight",
        ("attention", "key", "kernel"): "self_attn.k_proj.weight",
        ("attention", "value", "kernel"): "self_attn.v_proj.weight",
        ("attention", "output", "kernel"): "self_attn.o_proj.weight",
        ("mlp", "gate", "kernel"): "mlp.gate_proj.weight",
        ("mlp", "up", "kernel"): "mlp.up_proj.weight",
        ("mlp", "down", "kernel"): "mlp.down_proj.weight",
        ("attention_norm", "scale"): "input_layernorm.weight",
        ("mlp_norm", "scale"): "post_attention_layernorm.weight",
    }
    flat = {("source", "weights", *path): arrays[stacked + name] for path, name in names.items()}
    flat["final_norm", "scale"] = arrays["param/transformer.norm.weight"]
    flat["token_embedding", "table"] = pad_table(arrays["param/embeddings.token_embeddings"])
    flat["head",] = pad_table(arrays["param/lm_head.weight"]).T
    return jax.tree.map(jnp.asarray, unflatten_dict(flat))


@pytest.fixture(scope="module")
def gpt():
    arrays = load("gpt_ode.npz")
    return arrays, LanguageModel(GPT_ODE), gpt_params(arrays, "param")


def test_times_features_and_embeddings(gpt):
    arrays, _, params = gpt
    features = time_features(jnp.asarray(arrays["time/t"]), 16, 1000.0)
    np.testing.assert_allclose(features, arrays["time/sinusoidal"], atol=1e-4)
    for theirs, ours in LAYERS.items():
        p = {"params": params["source"][ours]["time_embedding"]}
        e = TimeEmbedding(12).apply(p, jnp.asarray(arrays["time/sinusoidal"]))
        np.testing.assert_allclose(e, arrays[f"time/e/{theirs}"], atol=1e-6)


def test_generated_weights(gpt):
    arrays, model, params = gpt
    weights = flatten_dict(model.apply({"params": params}, method="weights"), sep=".")
    for theirs, ours in LAYERS.items():
        kernel, bias = ("scale", "shift") if "ln" in theirs else ("kernel", "bias")
        np.testing.assert_allclose(weights[f"{ours}.{kernel}"], arrays[f"W/{theirs}"], atol=5e-6)
        np.testing.assert_allclose(weights[f"{ours}.{bias}"], arrays[f"b/{theirs}"], atol=5e-6)


def test_states_and_logits(gpt):
    arrays, model, params = gpt
    tokens = jnp.asarray(arrays["input/tokens"], jnp.int32)

    @jax.jit
    def run(params):
        weights = model.apply({"params": params}, method="weights")
        states = model.apply({"params": params}, tokens, weights, method="trajectory")
        return states, model.apply({"params": params}, tokens)

    states, logits = run(params)
    np.testing.assert_allclose(states[0], arrays["state/x0"], atol=1e-6)
    np.testing.assert_allclose(states[1:], arrays["state/trajectory"], atol=1e-5)
    np.testing.assert_allclose(logits[..., :97], arrays["output/logits"], atol=1e-5)


@pytest.mark.parametrize("num_steps", [3, 6, 12])
def test_logits_on_other_grids(gpt, num_steps):
    arrays, _, params = gpt
    model = LanguageModel(dataclasses.replace(GPT_ODE, num_steps=num_steps))
    logits = jax.jit(model.apply)(
        {"params": params}, jnp.asarray(arrays["input/tokens"], jnp.int32)
    )
    expected = arrays[f"evaluate_at/logits_{num_steps}"]
    np.testing.assert_allclose(logits[..., :97], expected, atol=1e-5)


@pytest.mark.slow
def test_gradients_of_every_parameter(gpt):
    arrays, model, params = gpt
    tokens = jnp.asarray(arrays["input/tokens"], jnp.int32)

    def loss(params):
        y, head, _ = model.apply({"params": params}, tokens[:, :-1], method="state_and_head")
        losses = token_losses(y, head, tokens[:, 1:], vocab_size=97, chunk=7).losses
        return losses.mean()

    value, gradient = jax.jit(jax.value_and_grad(loss))(params)
    assert float(value) == pytest.approx(float(arrays["output/loss"]), abs=1e-5)
    expected = flatten_dict(gpt_params(arrays, "grad"), sep="/")
    found = flatten_dict(gradient, sep="/")
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if name == "token_embedding/table":  # the padding has no counterpart
            value, found[name] = value[:97], found[name][:97]
        bound = 5e-5 * float(jnp.abs(value).max())
        np.testing.assert_allclose(found[name], value, atol=bound, err_msg=name)


def test_llama_baseline():
    arrays = load("llama_vanilla.npz")
    model = LanguageModel(LLAMA)
    tokens = jnp.asarray(arrays["input/tokens"], jnp.int32)
    params = {"params": llama_params(arrays)}
    logits = jax.jit(model.apply)(params, tokens)
    np.testing.assert_allclose(logits[..., :97], arrays["output/logits"], atol=1e-5)
    y, head, _ = jax.jit(partial(model.apply, method="state_and_head"))(params, tokens)
    losses = token_losses(y[:, :-1], head, tokens[:, 1:], vocab_size=97, chunk=100).losses
    expected = arrays["output/loss_per_position"][:, :-1]
    np.testing.assert_allclose(losses, expected, atol=1e-5)
