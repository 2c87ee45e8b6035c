"""The official implementation's own numbers: arrays recorded from it, in tests/support/golden."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict
from small_models import GPT_ODE, LAYERS, gpt_ends, gpt_params, load, ode_layers, pad_table

from t5x_diffeq.model.language_model import LanguageModel
from t5x_diffeq.model.ode.hyper_init import TimeEmbedding
from t5x_diffeq.model.ode.time_basis import Sinusoids
from t5x_diffeq.training.losses import losses_and_choices

LLAMA = dataclasses.replace(
    GPT_ODE,
    architecture="llama",
    weights="per_layer",
    scheme="lie_trotter",
    step_size="1",
    mlp_dim=64,
)


GPT = dataclasses.replace(GPT_ODE, weights="per_layer", scheme="lie_trotter", step_size="1")
LLAMA_ODE = dataclasses.replace(
    GPT_ODE,
    architecture="llama",
    mlp_dim=64,
    mlp_input="attention_norm",
    norm_shift=True,
    norm_eps=1e-6,
)
LAYERS_OF_LLAMA = {  # of the official Llama: ours
    "self_attn.q_proj": "attention.query",
    "self_attn.k_proj": "attention.key",
    "self_attn.v_proj": "attention.value",
    "self_attn.o_proj": "attention.output",
    "mlp.gate_proj": "mlp.gate",
    "mlp.up_proj": "mlp.up",
    "mlp.down_proj": "mlp.down",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "mlp_norm",
}
LAYERS_OF_GPT = {
    **{theirs: ours for theirs, ours in LAYERS.items() if not theirs.endswith("_ln")},
    "ln_1": "attention_norm",
    "ln_2": "mlp_norm",
}


def stacked_params(arrays, kind, stacked, layers):
    """The leaves of an official model's layers, `[N, ...]`, as our tree."""
    flat = {}
    for theirs, ours in layers.items():
        names = ("scale", "shift") if "norm" in ours else ("kernel", "bias")
        for leaf, name in zip(("weight", "bias"), names, strict=True):
            value = arrays.get(f"{kind}/{stacked}.{theirs}.{leaf}")
            if value is not None:
                flat["source", "weights", *ours.split("."), name] = value
    return flat


def llama_ends(arrays, kind, norm):
    """The leaves of an official Llama outside its layers."""
    return {
        ("final_norm", "scale"): arrays[f"{kind}/{norm}.weight"],
        ("token_embedding", "table"): pad_table(arrays[f"{kind}/embeddings.token_embeddings"]),
        ("head",): pad_table(arrays[f"{kind}/lm_head.weight"]).T,
    }


def as_tree(flat):
    return jax.tree.map(jnp.asarray, unflatten_dict(flat))


def llama_params(arrays, kind):
    layers = stacked_params(arrays, kind, "transformer.layers.stacked", LAYERS_OF_LLAMA)
    return as_tree({**layers, **llama_ends(arrays, kind, "transformer.norm")})


def llama_ode_params(arrays, kind):
    layers = ode_layers(arrays, kind, LAYERS_OF_LLAMA)
    return as_tree({**layers, **llama_ends(arrays, kind, "transformer.norm")})


def gpt_baseline_params(arrays, kind):
    layers = stacked_params(arrays, kind, "transformer.blocks.stacked", LAYERS_OF_GPT)
    return as_tree({**layers, **gpt_ends(arrays, kind)})


@pytest.fixture(scope="module")
def gpt():
    arrays = load("gpt_ode.npz")
    return arrays, LanguageModel(GPT_ODE), gpt_params(arrays, "param")


def test_times_features_and_embeddings(gpt):
    arrays, _, params = gpt
    features = Sinusoids(16, 1000.0)(jnp.asarray(arrays["time/t"]))
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
@pytest.mark.every_case
@pytest.mark.parametrize(
    ("name", "config", "params_of"),
    [
        ("gpt_ode", GPT_ODE, gpt_params),
        ("gpt_vanilla", GPT, gpt_baseline_params),
        ("llama_ode", LLAMA_ODE, llama_ode_params),
        ("llama_vanilla", LLAMA, llama_params),
    ],
)
def test_logits_loss_and_gradients(name, config, params_of):
    arrays, model = load(f"{name}.npz"), LanguageModel(config)
    tokens = jnp.asarray(arrays["input/tokens"], jnp.int32)
    params = params_of(arrays, "param")
    logits = jax.jit(model.apply)({"params": params}, tokens)
    np.testing.assert_allclose(logits[..., :97], arrays["output/logits"], atol=1e-5)

    def loss(params):
        y, head, _ = model.apply({"params": params}, tokens[:, :-1], method="state_and_head")
        losses, _ = losses_and_choices(y, head, tokens[:, 1:], vocab_size=97, chunk=7)
        return losses.mean()

    value, gradient = jax.jit(jax.value_and_grad(loss))(params)
    assert float(value) == pytest.approx(float(arrays["output/loss"]), abs=1e-5)
    expected = flatten_dict(params_of(arrays, "grad"), sep="/")
    gradients = flatten_dict(gradient, sep="/")
    assert gradients.keys() == expected.keys()
    for leaf, value in expected.items():
        found = gradients[leaf]
        if leaf in ("token_embedding/table", "head"):  # the padding has no counterpart
            axis = 0 if leaf.endswith("table") else 1
            value, found = (jnp.take(x, jnp.arange(97), axis) for x in (value, found))
        bound = 5e-5 * float(jnp.abs(value).max())
        np.testing.assert_allclose(found, value, atol=bound, err_msg=leaf)
