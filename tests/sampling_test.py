"""Generation with a cache is that without one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_models import EVERY_OPTION, random_params, small

from t5x_diffeq.inference.sampling import Sampling, generate

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
        {"scheme": "leapfrog"},
        {"scheme": "reversible:heun", "architecture": "llama"},
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
