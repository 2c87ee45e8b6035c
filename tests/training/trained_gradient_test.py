"""Gradients in bfloat16 after training, which makes some of them small by cancellation.

launch/test.sh --whole --slow tests/training/trained_gradient_test.py -s    # all leaves
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from helpers import setup_of

from configs import default
from t5x_diffeq.model.language_model import LanguageModel
from t5x_diffeq.training.losses import sum_of_terms
from t5x_diffeq.training.objective import end_of_pass
from t5x_diffeq.training.step import make_gradient, make_train_step
from t5x_diffeq.training.terms import CrossEntropy

VOCAB, LENGTH, ROWS = 256, 64, 64
MODELS = {
    "gpt": ("ode", "gpt"),
    "gpt smooth": ("smooth", "gpt"),
    "gpt compact": ("compact", "gpt"),
    "llama": ("ode", "llama"),
}
TOLERANCE = 0.02  # norm of the difference over norm of the reference


def bigram_text(number):
    """Batch `number` of a text with Zipf's counts, in which each token has a few successors."""
    counts = 1 / np.arange(1, VOCAB + 1)
    counts /= counts.sum()
    successors = np.random.default_rng(1).choice(VOCAB, p=counts, size=(VOCAB, 4))
    rng = np.random.default_rng(number)
    tokens = np.empty((ROWS, LENGTH + 1), np.int32)
    tokens[:, 0] = rng.choice(VOCAB, p=counts, size=ROWS)
    for n in range(LENGTH):
        follows = successors[tokens[:, n], rng.integers(0, 4, ROWS)]
        any_token = rng.choice(VOCAB, p=counts, size=ROWS)
        tokens[:, n + 1] = np.where(rng.random(ROWS) < 0.3, any_token, follows)
    mask = jnp.ones((ROWS, LENGTH), jnp.float32)
    return {
        "inputs": jnp.asarray(tokens[:, :-1]),
        "targets": jnp.asarray(tokens[:, 1:]),
        "mask": mask,
    }


def setup_with(model, dtype):
    variant, architecture = MODELS[model]
    config = default.get_config()
    config.model.update(
        architecture=architecture,
        num_steps=6,
        embed_dim=32,
        num_heads=2,
        mlp_dim=128,
        time_embed_dim=12,
        num_frequencies=16,
        dtype=dtype,
        dropout_rate=0.0,
        remat="none",
    )
    config.data.update(tokenizer="bytes", sequence_length=LENGTH)
    config.train.update(batch_size=ROWS, total_steps=300, loss_chunk=1024)
    config.optimizer.update(learning_rate=3e-3, warmup_fraction=0.1)
    return setup_of(default.set_variant(config, variant), VOCAB, jax.devices()[:1])


@pytest.fixture
def steps(whole):
    """The numbers of optimizer steps after which gradients are compared."""
    return (0, 30, 80, 300) if whole else (80,)


@functools.cache
def trained(model, steps):
    """Parameters after each number of steps, in float32, on a quarter of the rows."""
    setup, kept = setup_with(model, "float32"), {}
    step = jax.jit(make_train_step(setup))
    state = setup.init_state()
    for n in range(max(steps)):
        kept[n] = state.params
        batch = jax.tree.map(lambda x: x[: ROWS // 4], bigram_text(n))
        state, _ = step(state, batch, setup.schedule)
    return {n: kept.get(n, state.params) for n in steps}


def weights_of(model, params):
    return nn.apply(LanguageModel.weights, model)({"params": params})


def gradient_of_weights(setup, params, weights, dtype):
    """Of W(t), embeddings and the head, in a dtype, where all of them are rounded to bfloat16."""
    rest = {name: leaf for name, leaf in params.items() if name != "source"}

    def loss(rest, weights):
        batch = bigram_text(1000)
        end = end_of_pass(setup.model, rest, batch, weights)
        weights = jnp.full(batch["targets"].shape, 1 / batch["targets"].size)
        sizes = {"vocab_size": setup.model.config.vocab_size, "chunk": 1024}
        model = end.y, end.head
        terms = (CrossEntropy(1.0),)
        total, _ = sum_of_terms(terms, model, None, batch["targets"], weights, **sizes)
        return total

    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), rest)
    of_norm = {"final_norm": rest["final_norm"]}  # used in float32
    rest = jax.tree.map(lambda x: x.astype(jnp.float32), narrow) | of_norm
    weights = jax.tree.map(lambda w: w.astype(dtype) if w.dtype == jnp.bfloat16 else w, weights)
    return flat(jax.jit(jax.grad(loss, argnums=(0, 1)))(rest, weights))


def flat(gradient):
    leaves = jax.tree_util.tree_leaves_with_path(gradient)
    return {jax.tree_util.keystr(path): np.asarray(leaf, np.float32) for path, leaf in leaves}


def errors(found, expected):
    """By leaf: the norm of the difference over that of the leaf; and the leaf's share."""
    whole = np.sqrt(sum(np.square(leaf).sum() for leaf in expected.values()))
    norms = {path: np.linalg.norm(leaf) for path, leaf in expected.items() if leaf.any()}
    return {
        path: (float(np.linalg.norm(found[path] - expected[path]) / norm), float(norm / whole))
        for path, norm in norms.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.in_turns("whole programs")
def test_gradients_after_training(model, steps):
    """In one test, as training takes most of the time."""
    check_that_weights_are_rounded_once(model, steps)
    check_every_leaf(model, steps)
    check_the_whole_gradient(model, steps)


def check_that_weights_are_rounded_once(model, steps):
    params = trained(model, steps)[80]
    exact, rounded = (
        weights_of(setup_with(model, d).model, params) for d in ("float32", "bfloat16")
    )
    jax.tree.map(
        lambda x, r: np.testing.assert_array_equal(np.asarray(x.astype(r.dtype)), np.asarray(r)),
        exact,
        rounded,
    )


def check_every_leaf(model, steps):
    """Of what a pass reads: W(t), embeddings, the head. Its rounded values are taken as exact."""
    narrow, wide = (setup_with(model, dtype) for dtype in ("bfloat16", "float32"))
    for after, params in trained(model, steps).items():
        weights = weights_of(narrow.model, params)
        worst = errors(
            gradient_of_weights(narrow, params, weights, jnp.bfloat16),
            gradient_of_weights(wide, params, weights, jnp.float32),
        )
        assert max(worst.values())[0] < TOLERANCE, (after, worst)


def check_the_whole_gradient(model, steps):
    """Rounding W(t), embeddings and the head moves the gradient, too: by little of its norm."""

    def gradients(dtype):
        setup = setup_with(model, dtype)
        of_batch = jax.jit(make_gradient(setup.model, lambda part: True, setup.config.train))
        return {
            after: flat(of_batch(params, bigram_text(1000), jax.random.key(0)).gradient)
            for after, params in trained(model, steps).items()
        }

    rounded, exact = gradients("bfloat16"), gradients("float32")
    for after in steps:
        of_leaves = errors(rounded[after], exact[after])
        whole = np.sqrt(sum((error * share) ** 2 for error, share in of_leaves.values()))
        over = {path: each for path, each in of_leaves.items() if each[0] > TOLERANCE}
        path = max(of_leaves, key=of_leaves.get)
        error, share = of_leaves[path]
        print(
            f"{model}, {after} steps: {whole:.2%} of the whole; {len(over)} of {len(of_leaves)} "
            f"leaves over {TOLERANCE:.0%}; worst {error:.1%}, {path}, {share:.1e} of the norm"
        )
        assert whole < TOLERANCE
