"""Samples of text while training, and what describes a run."""

from dataclasses import replace

import jax.numpy as jnp
import pytest
from helpers import setup_of, small_config, training_of

from t5x_diffeq.data.tokenizer import ByteTokenizer
from t5x_diffeq.inference.hooks import SAMPLING, Samples
from t5x_diffeq.inference.sampling import Continuation, generate, grow
from t5x_diffeq.system.errors import InputError
from t5x_diffeq.training.hooks import LoopPosition

TOKENIZER = ByteTokenizer()


@pytest.fixture(scope="module")
def setup(text):
    """Of a model of 128 tokens on two devices; its parameters are random."""
    config = small_config(text)
    config.mesh.fsdp = 2
    config.data.sequence_length = 128
    return setup_of(config)


@pytest.mark.slow
def test_each_prompt_is_continued_as_alone(setup, tmp_path):
    setup = with_samples(setup, ("", "line 12", "x"))
    training = training_of(setup, tmp_path, TOKENIZER)
    samples = Samples(training)
    with setup.context():
        state = setup.init_state()
        params = state.params
        for _ in range(2):
            samples.run(LoopPosition(5, state, 5))
        first, found = [call.args[1] for call in training.writer.write_texts.call_args_list]
        assert first == found
        row = Continuation(TOKENIZER, samples.prompts[1])
        prompts, keys = [row.prompt] * 4, samples.keys()[jnp.full(4, 1)]  # 2 per device
        for _ in grow([row], generate(setup.model, params, prompts, 64, SAMPLING, keys)):
            pass
    assert found.keys() == {"sample/0", "sample/1", "sample/2"}
    assert samples.prompts[0] == [TOKENIZER.end_of_text]
    assert found["sample/1"] == row.text() and len(found["sample/1"]) > len("line 12")


def with_samples(setup, prompts):
    keys = {"train.sample_every": 5, "train.sample_prompts": prompts}
    return replace(setup, config=setup.config.with_values(keys))


def test_prompts_that_cannot_be_continued(setup, tmp_path):
    none, long = with_samples(setup, ()), with_samples(setup, ("x" * 500,))
    with pytest.raises(InputError, match=r"train\.sample_prompts is empty"):
        Samples.check(none.config, none)
    corpus = training_of(setup, tmp_path, TOKENIZER).corpus
    with pytest.raises(InputError, match=r"train\.sample_prompts has 500 tokens; .* 1 to 127: "):
        Samples.check_corpus(long.config, long, corpus)
