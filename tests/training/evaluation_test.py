"""The perplexity of a split depends on the split alone."""

from functools import cache

import jax.numpy as jnp
import numpy as np
import pytest
from clu.metrics import Average
from helpers import corpus_of, numbered_lines, setup_of, small_config

from t5x_diffeq.config.config import Config
from t5x_diffeq.data.batches import eval_batches
from t5x_diffeq.data.examples import eval_examples
from t5x_diffeq.training.evaluation import EvalMetrics, evaluate_loss, make_eval_step


@pytest.fixture(scope="module")
def perplexity(tmp_path_factory):
    """Of a model fresh from its key, by devices and batch size."""
    folder = tmp_path_factory.mktemp("evaluation")
    text = folder / "text.txt"
    text.write_text(numbered_lines(400))
    config = small_config(text)
    corpus = corpus_of(config.data, folder / "run", new=True)

    @cache
    def model_on(devices):
        config.mesh.fsdp = devices
        setup = setup_of(config, corpus.tokenizer.vocab_size)
        assert setup.mesh.size == devices
        with setup.context():
            return setup, setup.init_state().params

    def of(devices, batch_size):
        setup, params = model_on(devices)
        with setup.context():
            step = make_eval_step(setup)
            rows = setup.eval_batch_size(batch_size)
            batches = eval_batches(
                eval_examples(Config.of(config).data, corpus), rows, setup.batch_sharding
            )
            return evaluate_loss(step, params, batches)

    return of


@pytest.mark.slow
def test_perplexity_for_any_batch_size_and_devices(perplexity):
    expected = perplexity(1, 1)
    assert expected["tokens"] > 1000
    assert expected["tokens"] % 16  # the last window is ragged
    for devices, batch_size in ((1, 3), (1, 8), (8, 1), (8, 3), (8, 8)):
        found = perplexity(devices, batch_size)
        assert found["tokens"] == expected["tokens"]
        np.testing.assert_allclose(found["perplexity"], expected["perplexity"], rtol=1e-6)


def test_what_the_sums_of_batches_become():
    """Two batches of 2 and 3 tokens, 4 and 8 bytes, 1 and 5 nats in all."""
    batches = iter([{"loss": 1.0, "tokens": 2, "bytes": 4}, {"loss": 5.0, "tokens": 3, "bytes": 8}])

    def eval_step(params, batch):
        loss = Average(total=jnp.asarray(batch["loss"]), count=jnp.asarray(batch["tokens"]))
        return EvalMetrics(loss, None if batch["bytes"] is None else jnp.asarray(batch["bytes"]))

    assert evaluate_loss(eval_step, {}, batches) == {
        "loss": 1.2,
        "perplexity": pytest.approx(3.320117),
        "bits_per_byte": pytest.approx(6 / 12 * 1.442695),
        "tokens": 5,
    }
    for size in (None, 0):  # 0: special tokens alone
        batch = {"loss": 1.0, "tokens": 2, "bytes": size}
        assert "bits_per_byte" not in evaluate_loss(eval_step, {}, iter([batch]))
