"""The Python interface to a trained run."""

import subprocess
import sys
import textwrap

import jax
import numpy as np
import pytest
from helpers import ROOT

import t5x_diffeq as td
from t5x_diffeq.inference.sampling import Sampling
from t5x_diffeq.models.language_model import LanguageModel, nodes
from t5x_diffeq.runtime.errors import InputError
from t5x_diffeq.training.metrics import read_metrics


@pytest.fixture(scope="module")
def run(run_on_lines):
    return td.load(run_on_lines)


def test_import_is_light():
    """Neither jax nor anything else heavy."""
    code = "import sys, t5x_diffeq; sys.exit('jax' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
    with pytest.raises(AttributeError, match="no attribute 'lode'"):
        td.lode  # noqa: B018


def test_weights_at_the_nodes_are_those_of_the_grid(run):
    """At the times of the grid, `weights` is what the pass reads; elsewhere it differs."""
    config = run.run.setup.model.config
    grid = nodes(config)
    of_pass = run._apply(LanguageModel.weights)
    jax.tree.map(np.testing.assert_array_equal, run.weights(grid), of_pass)
    between = run.weights(grid + 0.3 / config.num_steps)
    differences = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), between, of_pass)
    assert max(jax.tree.leaves(differences)) > 0


def test_the_trajectory_ends_in_the_logits(run):
    text = "one line"
    states = run.trajectory(text)
    length = len(run.tokenizer.encode([text])[0])
    config = run.run.setup.model.config
    assert states.shape == (config.num_steps + 1, length, config.embed_dim)
    last = run._apply(LanguageModel.normalise, states[-1:])
    logits = run._apply(LanguageModel.logits, last)[0]
    np.testing.assert_allclose(logits, run.logits(text), rtol=1e-5, atol=1e-5)


def test_generate_takes_the_likeliest_token(run):
    prompt = "line"
    likeliest = int(run.logits(prompt)[-1].argmax())
    text = run.generate(prompt, max_tokens=1, sampling=Sampling(temperature=0))
    assert text == run.tokenizer.decode([*run.tokenizer.encode([prompt])[0].tolist(), likeliest])


def test_several_prompts_at_once(run):
    greedy = Sampling(temperature=0)
    both = run.generate(["line", "square"], max_tokens=3, sampling=greedy)
    assert both == [
        run.generate(each, max_tokens=3, sampling=greedy) for each in ("line", "square")
    ]


def test_the_loss_is_that_of_the_probabilities(run):
    text = "line 4"
    tokens = run.tokenizer.encode([text])[0]
    p = jax.nn.softmax(run.logits(text)[:, : run.tokenizer.vocab_size])
    expected = -np.log(p[np.arange(len(tokens) - 1), tokens[1:]]).mean()
    assert run.loss(text) == pytest.approx(expected, rel=1e-5)
    with pytest.raises(InputError, match="'l' has 1 tokens; a loss takes at least 2"):
        run.loss("l")


def test_another_grid(run_on_lines, run):
    double = 2 * run.run.setup.model.config.num_steps
    finer = run.at_depth(double, scheme="heun")
    assert len(finer.trajectory("line")) == double + 1
    loaded = td.load(run_on_lines, num_steps=double, scheme="heun")
    np.testing.assert_array_equal(finer.logits("line"), loaded.logits("line"))
    assert finer.evaluate(limit=1)["loss"] != run.evaluate(limit=1)["loss"]


def test_evaluate_is_what_training_reported(run, run_on_lines):
    *_, reported = (line["eval/loss"] for line in read_metrics(run_on_lines) if "eval/loss" in line)
    assert run.evaluate()["loss"] == pytest.approx(reported, rel=1e-5)


def test_the_lines_of_the_readme(run_on_lines, run, capsys):
    """They run as they stand, on this run."""
    text = (ROOT / "README.md").read_text()
    lines = text.partition("In Python, the run is\n\n")[2].partition("\n\n")[0]
    assert lines.count("\n") == 4
    code = textwrap.dedent(lines).replace("workdirs/tiny", str(run_on_lines))
    names = {}
    exec(code.replace("def main(", "line"), names)
    assert {len(leaf) for leaf in jax.tree.leaves(names["W"])} == {3}
    np.testing.assert_array_equal(names["y"], run.trajectory("line"))
    assert capsys.readouterr().out.startswith("line")


def test_too_long_a_text(run):
    with pytest.raises(InputError, match="tokens, and the model's length is"):
        run.logits("line " * 1000)
