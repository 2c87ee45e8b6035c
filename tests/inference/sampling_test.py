"""Generation with a cache is that without one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_models import EVERY_OPTION, random_params, small

from t5x_diffeq.inference.sampling import Sampling, generate
from t5x_diffeq.model.layers import attention
from t5x_diffeq.system.errors import InputError

PROMPTS = [[3, 1, 4, 1, 5], [9, 2], [6, 5, 3]]


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"architecture": "llama", "num_kv_heads": 2, "scheme": "lie_trotter"},
        {"scheme": "strang"},
        {"scheme": "rk4", "weights": "shared"},
        {"weights": "per_layer", "step_size": "1", "scheme": "lie_trotter"},
        EVERY_OPTION,
        {**EVERY_OPTION, "qk_norm": "head"},
    ],
    ids=str,
)
def test_greedy_equals_recomputing_the_prefix(changes):
    """Wherever the two best logits are not too near each other to tell."""
    model = small(**changes)
    params = random_params(model)

    @jax.jit
    def logits(tokens):
        return model.apply({"params": params}, tokens)

    found = np.stack(
        list(generate(model, params, PROMPTS, 5, Sampling(temperature=0), jax.random.key(0))), 1
    )
    assert found.shape == (3, 5)
    for row, prompt in enumerate(PROMPTS):
        tokens = list(prompt)
        for token in found[row]:
            padded = jnp.asarray([tokens + [0] * (10 - len(tokens))], jnp.int32)
            best = np.sort(np.asarray(logits(padded))[0, len(tokens) - 1])
            expected = int(np.argmax(np.asarray(logits(padded))[0, len(tokens) - 1]))
            assert token == expected or best[-1] - best[-2] < 1e-3
            tokens.append(int(token))


@pytest.mark.parametrize("temperature", [float("inf"), float("nan"), 1e38, 1e-5, -1.0])
def test_temperatures_that_are_none(temperature):
    with pytest.raises(InputError, match=r"temperature=.*; it must be 0 \(greedy\), or from 0.001"):
        Sampling(temperature=temperature)


def test_ids_that_pad_the_vocabulary_are_never_drawn():
    logits = jnp.array([[0.0, 1.0, -jnp.inf, -jnp.inf]])
    keys = jax.random.split(jax.random.key(0), 200)
    for temperature in (1e-3, 1.0, 1e3):
        drawn = jax.vmap(lambda key: Sampling(temperature)(logits, key)[0])(keys)  # noqa: B023
        assert set(np.asarray(drawn).tolist()) <= {0, 1}


def test_a_token_attends_to_the_cached_ones_and_to_itself():
    q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 4, 2, 8))
    positions = jnp.arange(4)[None]
    room = [(0, 0), (0, 3), (0, 0), (0, 0)]  # of tokens that aren't there yet
    cache = {"keys": jnp.pad(k, room), "values": jnp.pad(v, room)}
    found = attention._attend_to_cache(q, cache, positions)
    expected = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    np.testing.assert_allclose(found, expected, atol=1e-6)
