"""Per-layer models into ODEs: the same on their grid, or as near as T functions of time can be."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exported_models import CLASSIC, LENGTH, LLAMA, logits_of, random_run
from flax.core import meta
from flax.traverse_util import flatten_dict

from t5x_diffeq.exchange.layouts import declared_leaves
from t5x_diffeq.exchange.to_ode import ode_keys, to_ode
from t5x_diffeq.models.config import ModelConfig
from t5x_diffeq.models.language_model import LanguageModel
from t5x_diffeq.ode.weights import OFFSET

TOKENS = np.random.default_rng(1).integers(256, size=(2, LENGTH))
STEPS, WIDTH = 6, 3


def ode_of(changes, width=None, change=lambda weights: weights):
    """A random per-layer model after `change`, its ODE's config and parameters, and the errors."""
    run, _, _ = random_run(({**CLASSIC, "num_steps": STEPS, **changes}, "bytes"))
    weights = change(run.params["source"]["weights"])
    run.params["source"]["weights"] = jax.tree.map(np.asarray, weights)
    keys = ode_keys(run.placed.config.model, width)
    config = ModelConfig.of(keys, run.placed.model.config.vocab_size, LENGTH)
    config, _ = config.with_attention_for("cpu")
    params, errors = to_ode(config, dict(run.params))
    return run, config, jax.tree.map(jnp.asarray, params), errors


def difference_of_logits(run, config, params):
    """Of the ODE's and the layers', over the largest of these."""
    wanted = logits_of(run, TOKENS)
    logits = jax.jit(LanguageModel(config).apply)({"params": params}, jnp.asarray(TOKENS))
    return (
        np.abs(np.asarray(logits)[..., : config.vocab_size] - wanted).max() / np.abs(wanted).max()
    )


@pytest.mark.slow
@pytest.mark.parametrize("num_steps", [1, 12, 24])
def test_an_ode_is_the_same_on_its_own_grid(num_steps):
    sizes = {"num_steps": num_steps, "embed_dim": 32, "mlp_dim": 80}
    run, config, params, errors = ode_of({**LLAMA, **sizes})
    assert (config.weights, config.step_size) == ("time_dependent", "1/N")
    assert config.time_embed_dim == num_steps
    assert difference_of_logits(run, config, params) < 1e-4  # 1e-3 is promised
    assert max(errors.values()) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"width": 11}, {"time_embedding": "common"}])
def test_gpts_biases_and_shifts_too(changes):
    width = changes.pop("width", None)
    run, config, params, _ = ode_of(changes, width)
    assert difference_of_logits(run, config, params) < 1e-4
    expected = jax.eval_shape(LanguageModel(config).init, jax.random.key(0), jnp.asarray(TOKENS))
    shapes = jax.tree.map(jnp.shape, params)
    assert shapes == jax.tree.map(jnp.shape, meta.unbox(expected["params"]))


# ------------------------------------------------------------------------- fewer functions of time


def matrices(weights):
    return {
        path: np.asarray(leaf, np.float64).reshape(STEPS, -1)
        for path, leaf in flatten_dict(weights).items()
    }


def least_squares_of(wanted, role, rank):
    """The squares of the error of the truncated SVD, of the centred kernel or the leaf's change."""
    rest = wanted - wanted.mean(0) if role == "kernel" else wanted - OFFSET[role]
    return np.square(np.linalg.svd(rest, compute_uv=False)[rank:]).sum()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "factor"), [(LLAMA, 1.001), ({}, 1.05), ({"time_embedding": "common"}, np.inf)]
)
def test_errors_are_the_weights_own_and_the_least(changes, factor):
    """The squares are at most `factor` times those of the truncated SVD.

    Where an e(t) is for one leaf alone, as each of Llama's, the two are equal. GPT's kernels share
    it with the much smaller biases.
    """
    run, config, params, errors = ode_of(changes, WIDTH)
    declared = declared_leaves(config)
    layers, model = matrices(run.params["source"]["weights"]), LanguageModel(config)
    made = matrices(jax.jit(lambda p: model.apply({"params": p}, method="weights"))(params))
    of_kernels = np.zeros(2)
    for path, leaf in layers.items():
        role = declared[path].role
        wanted = leaf * (STEPS if declared[path].writes_residual else 1)
        squares, whole = np.square(made[path] - wanted).sum(), np.square(wanted).sum()
        least = least_squares_of(wanted, role, WIDTH)
        assert 0.999 * least < squares < np.square(wanted - OFFSET[role]).sum()
        if role == "kernel" or changes == LLAMA:
            assert squares < factor * least
        if role == "kernel":
            of_kernels += squares, whole
    assert errors["all kernels"] == pytest.approx((of_kernels[0] / of_kernels[1]) ** 0.5, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("time_embedding", ["separate", "common"])
@pytest.mark.parametrize("architecture", [LLAMA, {}], ids=["llama", "gpt"])
def test_layers_made_by_so_few_functions_are_found_again(time_embedding, architecture):
    """Layers that an ODE of width T makes are that ODE's: the same logits."""
    random = np.random.default_rng(0)
    e = random.normal(size=(STEPS, WIDTH)) + 1

    def make(path, leaf):
        P = 0.1 * random.normal(size=(WIDTH, *leaf.shape[1:]))
        varying = np.tensordot(e, P, 1)
        name = path[-1].key
        kernel = np.asarray(leaf)[:1] + varying
        made = kernel if name == "kernel" else varying + OFFSET[name]
        return made.astype(np.float32)

    run, config, params, errors = ode_of(
        {**architecture, "time_embedding": time_embedding},
        WIDTH,
        lambda weights: jax.tree_util.tree_map_with_path(make, weights),
    )
    assert max(errors.values()) < 1e-4
    assert difference_of_logits(run, config, params) < 1e-3


def test_constant_biases_are_kept():
    """Centred functions of time have no constant, of which GPT's biases consist here."""

    def make(path, leaf):
        return np.repeat(leaf[:1], STEPS, 0) if path[-1].key == "bias" else leaf

    *_, errors = ode_of({}, WIDTH, lambda w: jax.tree_util.tree_map_with_path(make, w))
    biases = [error for kind, error in errors.items() if kind.endswith("bias")]
    assert max(biases) < 0.101  # 0.1 of the constant is left out


def test_equal_layers_are_exact():
    def make(leaf):
        return np.repeat(leaf[:1], STEPS, 0)

    *_, errors = ode_of(LLAMA, 1, lambda weights: jax.tree.map(make, weights))
    assert max(errors.values()) < 1e-5
