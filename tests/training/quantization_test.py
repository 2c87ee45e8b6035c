"""Rounded weights: how far they move, which of them, and that nothing else changes."""

import json

import jax
import numpy as np
import pytest
from helpers import call

from studies import quantization
from t5x_diffeq.data.corpus import load_corpus
from t5x_diffeq.training.load import load_run


def test_an_entry_moves_by_half_a_step_of_its_output():
    kernel = jax.random.normal(jax.random.key(0), (3, 8, 5)) * np.arange(5)
    rounded = np.asarray(quantization.round_to_bits(kernel, 4, (1,)))
    largest = np.abs(kernel).max(1, keepdims=True)
    assert (np.abs(rounded - kernel) <= largest / 7 / 2 * (1 + 1e-5)).all()
    assert (rounded[..., 0] == 0).all()  # of an output whose kernel is zero
    for node, column in np.ndindex(3, 4):
        assert len(np.unique(rounded[node, :, column + 1])) <= 15


@pytest.fixture(scope="module")
def run_and_corpus(run_on_lines):
    corpus = load_corpus(run_on_lines)
    return load_run(run_on_lines, corpus.tokenizer.vocab_size, batch_size=1), corpus


@pytest.mark.slow
@pytest.mark.in_turns("trainings")
def test_layers_that_are_not_rounded_compute_the_same(run_and_corpus, monkeypatch):
    run, corpus = run_and_corpus
    monkeypatch.setattr(quantization, "round_to_bits", lambda kernel, bits, inputs: kernel)
    losses = quantization.evaluate_rounded(run, corpus, [8], 4, 2)
    assert losses["parameters, 8 bits"] == losses["loss"]
    assert losses["weights, 8 bits"] == pytest.approx(losses["loss"], abs=1e-6)


@pytest.mark.slow
def test_fewer_bits_cost_more(run_on_lines, capsys):
    call(quantization, f"--workdir={run_on_lines}", "--bits=8", "--bits=2", "--eval_batches=2")
    losses = json.loads(capsys.readouterr().out)
    for place in ("weights", "parameters"):
        near, far = (abs(losses[f"{place}, {bits} bits"] - losses["loss"]) for bits in (8, 2))
        assert near < 0.01 < far
