"""Drafts change no token when decoding is greedy, and no probability when it isn't."""

from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_models import random_params, small

from studies import drafts, speculation
from t5x_diffeq.inference.sampling import Sampling, generate, make_weights_by_step

PROMPTS = [[3, 1, 4], [9, 2], [6, 5, 3, 5]]
SMOOTH = {"num_steps": 6, "time_basis": "legendre:2", "time_embed_dim": 2}
LAYERS = {"num_steps": 4, "weights": "per_layer", "step_size": "1", "scheme": "lie_trotter"}


@pytest.mark.slow
@pytest.mark.parametrize("draft", drafts.DRAFTS)
def test_greedy_tokens_are_those_without_drafts(draft):
    model = small(**(LAYERS if draft == "exit" else SMOOTH), max_length=24)
    params = random_params(model, scale=0.1 if draft == "exit" else 0.3)
    weights = make_weights_by_step(model, params)
    drafter = drafts.drafter_of(model, draft, 2, 3)
    accepted = []
    for prompt in PROMPTS:
        plain = generate(model, params, [prompt], 15, Sampling(0), jax.random.key(0))
        found: list[int] = []
        for new, count in drafts.by_drafts(
            model, params, weights, drafter, 0.0, prompt, jax.random.key(1)
        ):
            found += new
            accepted.append(count)
            if len(found) >= 15:
                break
        assert found[:15] == np.concatenate(list(plain)).tolist()
    assert 0 < sum(accepted) < 3 * len(accepted)  # some were accepted, some not


def test_tokens_have_the_probabilities_of_the_fine_grid():
    """Three tokens in a row of an alphabet of three; q is far from p, and depends on the past."""
    rng = np.random.default_rng(0)
    p_of, q_of = (
        {
            past: rng.dirichlet(np.full(3, 5.0))
            for n in range(3)
            for past in product(range(3), repeat=n)
        }
        for _ in range(2)
    )
    p_table, q_table = (
        [
            jnp.asarray([t[past] for past in product(range(3), repeat=n)], jnp.float32)
            for n in range(3)
        ]
        for t in (p_of, q_of)
    )

    def three_tokens(key):
        """Two drafted tokens and the one after them."""
        keys = jax.random.split(key, 3)
        first = drafts.draw(q_table[0][0], 1.0, keys[0])
        second = drafts.draw(q_table[1][first], 1.0, keys[1])
        q = jnp.stack((q_table[0][0], q_table[1][first]))
        p = jnp.stack((p_table[0][0], p_table[1][first], p_table[2][3 * first + second]))
        return drafts.accept(p, q, jnp.stack((first, second)), 1.0, keys[2])

    tokens, count = jax.jit(jax.vmap(three_tokens))(jax.random.split(jax.random.key(0), 60_000))
    tokens, count = np.asarray(tokens), np.asarray(count)
    for n in range(3):  # of the samples that reach token n, in each past
        for past in product(range(3), repeat=n):
            chosen = (count >= n) & (tokens[:, :n] == past).all(1)
            drawn = np.bincount(tokens[chosen, n], minlength=3) / chosen.sum()
            assert 0.5 * np.abs(drawn - p_of[past]).sum() < 2 / np.sqrt(chosen.sum()), past


def test_acceptance_is_what_makes_so_many_tokens():
    assert speculation.acceptance(0.7 + 0.7**2 + 0.7**3, 3) == pytest.approx(0.7)
