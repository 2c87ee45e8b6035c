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
from t5x_diffeq.tracking.jsonl import read_metrics


@pytest.fixture(scope="module")
def run(run_on_lines):
    return td.load(run_on_lines)


def test_import_is_light():
    """Neither jax nor anything else heavy."""
    code = "import sys, t5x_diffeq; sys.exit('jax' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
    with pytest.raises(AttributeError, match="no attribute 'lode'"):
        td.lode  # noqa: B018


@pytest.mark.slow
def test_weights_at_the_nodes_are_those_of_the_grid(run):
    """At the times of the grid, `weights` is what the pass reads; elsewhere it differs."""
    config = run.run.placed.model.config
    grid = nodes(config)
    of_pass = run._apply(LanguageModel.weights)
    jax.tree.map(np.testing.assert_array_equal, run.weights(grid), of_pass)
    between = run.weights(grid + 0.3 / config.num_steps)
    differences = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), between, of_pass)
    assert max(jax.tree.leaves(differences)) > 0


@pytest.mark.slow
def test_the_trajectory_ends_in_the_logits(run):
    text = "one line"
    states = run.trajectory(text)
    length = len(run.tokenizer.encode([text])[0])
    config = run.run.placed.model.config
    assert states.shape == (config.num_steps + 1, length, config.embed_dim)
    last = run._apply(LanguageModel.normalise, states[-1:])
    logits = run._apply(LanguageModel.logits, last)[0]
    np.testing.assert_allclose(logits, run.logits(text), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_generate_takes_the_likeliest_token(run):
    prompt = "line"
    likeliest = int(run.logits(prompt)[-1].argmax())
    text = run.generate(prompt, max_tokens=1, sampling=Sampling(temperature=0))
    assert text == run.tokenizer.decode([*run.tokenizer.encode([prompt])[0].tolist(), likeliest])


@pytest.mark.slow
def test_several_prompts_at_once(run):
    greedy = Sampling(temperature=0)
    both = run.generate(["line", "square"], max_tokens=3, sampling=greedy)
    assert both == [
        run.generate(each, max_tokens=3, sampling=greedy) for each in ("line", "square")
    ]


@pytest.mark.slow
def test_the_loss_is_that_of_the_probabilities(run):
    text = "line 4"
    tokens = run.tokenizer.encode([text])[0]
    p = jax.nn.softmax(run.logits(text)[:, : run.tokenizer.vocab_size])
    expected = -np.log(p[np.arange(len(tokens) - 1), tokens[1:]]).mean()
    assert run.loss(text) == pytest.approx(expected, rel=1e-5)
    with pytest.raises(InputError, match="'l' has 1 tokens; a loss takes at least 2"):
        run.loss("l")


@pytest.mark.slow
def test_another_grid(run_on_lines, run):
    double = 2 * run.run.placed.model.config.num_steps
    finer = run.at_depth(double, scheme="heun")
    assert len(finer.trajectory("line")) == double + 1
    loaded = td.load(run_on_lines, num_steps=double, scheme="heun")
    np.testing.assert_array_equal(finer.logits("line"), loaded.logits("line"))
    assert finer.evaluate(limit=1)["loss"] != run.evaluate(limit=1)["loss"]


def test_evaluate_is_what_training_reported(run, run_on_lines):
    *_, reported = (line["eval/loss"] for line in read_metrics(run_on_lines) if "eval/loss" in line)
    assert run.evaluate()["loss"] == pytest.approx(reported, rel=1e-5)


@pytest.mark.slow
def test_the_lines_of_the_readme(run_on_lines, run, capsys):
    """They run as they stand, on this run."""
    text = (ROOT / "README.md").read_text()
    lines = text.partition("In Python, the run is\n\n")[2].partition("\n\n")[0]
    assert lines.count("\n") == 5
    code = textwrap.dedent(lines).replace("workdirs/tiny", str(run_on_lines))
    names = {}
    exec(code.replace("def main():", "line"), names)
    assert {len(leaf) for leaf in jax.tree.leaves(names["W"])} == {3}
    np.testing.assert_array_equal(names["y"], run.trajectory("line"))


@pytest.mark.slow
def test_the_five_lines_on_the_first_run(tmp_path):
    """Trains configs/tiny.py for a few steps in Python, and looks inside."""
    values = {"train.total_steps": 5, "train.eval_batches": 1, "train.eval_all_at_end": False}
    config = td.load_config("configs/tiny.py", values)
    run = td.train(config, tmp_path / "tiny")
    assert {len(leaf) for leaf in jax.tree.leaves(run.weights(t=[0.0, 0.5, 1.0]))} == {3}
    assert run.trajectory("def main():").shape == (7, len(run.tokens("def main():")), 128)
    assert run.at_depth(12, scheme="heun").evaluate(limit=1)["loss"] > 0
    (text,) = run.generate(["def main():"], max_tokens=40)
    assert text.startswith("def main():") and len(run.tokens(text)) > 10
    again = td.train(config, tmp_path / "tiny")  # it is finished: loaded, not trained
    assert again.loss("def main():") == run.loss("def main():")


def test_configs_that_can_not_be_loaded():
    for file, values, message in (
        ("configs/nothing.py", {}, "configs/nothing.py: there is no such file"),
        ("configs/tiny.py:odd", {}, "variant 'odd' is unknown"),
        ("configs/tiny.py", {"model.width": 3}, "config key 'model.width' does not exist"),
        ("configs/tiny.py", {"model.num_steps": 0}, "model.num_steps is 0; it must be at least 1"),
    ):
        with pytest.raises(InputError, match=message):
            td.load_config(file, values)
    assert td.load_config("configs/tiny.py:baseline").model.weights == "per_layer"


@pytest.mark.parametrize("scheme", ["euler", "midpoint", "rk4"])
def test_integrate_takes_a_field_of_ones_own(scheme):
    """Against the exact solution of dy/dt = t y, and the gradient with respect to y(0)."""

    def grow(t, y):
        return t * y

    def end(y, steps=64):
        return td.integrate(grow, lambda t: t, y, scheme=scheme, num_steps=steps)

    error = {"euler": 2e-2, "midpoint": 1e-4, "rk4": 1e-6}[scheme]
    np.testing.assert_allclose(end(np.ones(3)), np.full(3, np.exp(0.5)), rtol=error)
    slope = jax.grad(lambda y: end(y).sum())(np.ones(3))
    np.testing.assert_allclose(slope, np.full(3, np.exp(0.5)), rtol=error)
    times = td.grid(scheme, 4).reshape(-1)
    by_values = td.integrate(grow, times, np.ones(3), scheme=scheme, num_steps=4)
    np.testing.assert_array_equal(by_values, end(np.ones(3), 4))
    states = td.integrate(grow, times, np.ones(3), scheme=scheme, num_steps=4, keep=True)
    assert states.shape == (5, 3)
    np.testing.assert_allclose(states[-1], by_values, rtol=1e-6)
    with pytest.raises(InputError, match=rf"4 steps of {scheme} read them at {len(times)} times"):
        td.integrate(grow, times[1:], np.ones(3), scheme=scheme, num_steps=4)


def test_too_long_a_text(run):
    with pytest.raises(InputError, match="tokens, and the model's length is"):
        run.logits("line " * 1000)
