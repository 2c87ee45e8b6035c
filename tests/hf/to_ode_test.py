"""Per-layer models into ODEs: the same on their grid."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exported_models import CLASSIC, LENGTH, LLAMA, logits_of, random_run

from t5x_diffeq.hf.to_ode import ode_keys, to_ode
from t5x_diffeq.model.config import ModelConfig
from t5x_diffeq.model.language_model import LanguageModel

TOKENS = np.random.default_rng(1).integers(256, size=(2, LENGTH))
STEPS = 6


def ode_of(changes):
    """A random per-layer model, and its ODE's config and parameters."""
    run, _, _ = random_run(({**CLASSIC, "num_steps": STEPS, **changes}, "bytes"))
    run.params["source"]["weights"] = jax.tree.map(np.asarray, run.params["source"]["weights"])
    keys = ode_keys(run.placed.config.model)
    config = ModelConfig.of(keys, run.placed.model.config.vocab_size, LENGTH)
    config, _ = config.with_attention_for("cpu")
    params = to_ode(config, dict(run.params))
    return run, config, jax.tree.map(jnp.asarray, params)


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
    run, config, params = ode_of({**LLAMA, **sizes})
    assert (config.weights, config.step_size) == ("time_dependent", "1/N")
    assert config.time_embed_dim == num_steps
    assert difference_of_logits(run, config, params) < 1e-4  # 1e-3 is promised
