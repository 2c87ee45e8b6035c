"""The Python interface to a trained run."""

import json
import re
import shutil
import subprocess
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import ROOT

import t5x_diffeq as td
from t5x_diffeq.data.file_tokenizers import SentencePieceTokenizer
from t5x_diffeq.inference import trained_run
from t5x_diffeq.inference.validation import describe_trained_grids, is_smooth, is_trained_grid
from t5x_diffeq.model.language_model import LanguageModel, nodes
from t5x_diffeq.system.errors import InputError
from t5x_diffeq.training.tracking.jsonl import read_metrics


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
    jax.tree.map(np.testing.assert_array_equal, dict(run.weights(grid)), of_pass)
    between = dict(run.weights(grid - 0.3 / config.num_steps))
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
    assert finer.evaluate(eval_batches=1)["loss"] != run.evaluate(eval_batches=1)["loss"]


def test_evaluate_is_what_training_reported(run, run_on_lines):
    *_, reported = (line["eval/loss"] for line in read_metrics(run_on_lines) if "eval/loss" in line)
    assert run.evaluate()["loss"] == pytest.approx(reported, rel=1e-5)


def test_a_run_that_was_copied_without_its_tokens(run_on_lines, run, tmp_path):
    """It generates; only what reads its validation text asks for them."""
    shutil.copytree(run_on_lines, tmp_path / "copy")
    shutil.rmtree(tmp_path / "copy" / "data")
    copy = td.load(tmp_path / "copy")
    assert copy.generate("a", max_tokens=3) == run.generate("a", max_tokens=3)
    with pytest.raises(InputError, match=r"has lost its tokens in data/0/; restore them or"):
        copy.evaluate()


def test_a_config_that_was_changed_by_hand(run_on_lines, tmp_path, capsys):
    """It is used, and said to be another one, once."""
    shutil.copytree(run_on_lines, tmp_path / "copy")
    td.load(tmp_path / "copy")
    assert "was changed" not in capsys.readouterr().err
    file = tmp_path / "copy" / "config.json"
    values = json.loads(file.read_text())
    values["model"]["scheme"] = "heun"
    file.write_text(json.dumps(values))
    td.load(tmp_path / "copy")
    assert f"{file} was changed after the run wrote it; it is" in capsys.readouterr().err
    td.load(tmp_path / "copy")
    assert "was changed" not in capsys.readouterr().err


@pytest.mark.slow
def test_the_lines_of_the_readme(run_on_lines, run, capsys):
    """They run as they stand, on this run."""
    text = (ROOT / "README.md").read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert code.count("run.") == 4
    code = code.replace("examples/smooth", str(run_on_lines))
    names = {}
    exec(code.replace("ROMEO:", "line"), names)
    assert {len(leaf) for leaf in jax.tree.leaves(names["W"])} == {3}
    np.testing.assert_array_equal(names["y"], run.trajectory("line"))


@pytest.mark.slow
@pytest.mark.in_turns("whole programs")
def test_the_five_lines_on_the_first_run(tmp_path):
    """Trains configs/tiny.py for a few steps in Python, and looks inside."""
    values = {"train.total_steps": 5, "train.eval_batches": 1, "train.eval_all_at_end": False}
    config = td.load_config("configs/tiny.py", values)
    run = td.train(config, tmp_path / "tiny")
    assert {len(leaf) for leaf in jax.tree.leaves(run.weights(t=[0.0, 0.5, 1.0]))} == {3}
    assert run.trajectory("def main():").shape == (7, len(run.tokens("def main():")), 128)
    assert run.at_depth(12, scheme="heun").evaluate(eval_batches=1)["loss"] > 0
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


def test_a_run_says_what_it_is(run, run_on_lines, monkeypatch):
    """A few short lines, also where its metrics can't be read; a table in a notebook."""
    lines = repr(run).splitlines()
    assert len(lines) == 5 and max(map(len, lines)) < 200
    for word in (f"{run_on_lines}, step 20", "gpt, W(t) = W0 + P", "2 steps of euler, as trained"):
        assert word in repr(run)
    loss = list(read_metrics(run_on_lines))[-1]["eval/loss"]
    assert f"{loss:.4f} nats" in repr(run)
    assert run._repr_html_().count("<tr>") == 5
    for other in (run.at_depth(4), run.at_depth(2, "heun")):
        assert "not a grid that it was trained on" in repr(other)
        assert repr(other).endswith("validation loss  unknown: evaluate()")
    assert repr(run.at_depth(4).at_depth(2)) == repr(run)
    monkeypatch.setattr(trained_run, "read_metrics", unreadable)
    assert "unknown" in repr(run)


def unreadable(workdir, name):
    raise InputError("it can't be read")


def test_what_is_known_of_a_run(run):
    assert (run.num_steps, run.step, run.config.train.total_steps) == (2, 20, 20)
    assert run.at_depth(5).num_steps == 5 and run.at_depth(5).config.model.num_steps == 2
    assert "".join(run.pieces("line 1")) == "line 1"
    assert run.metrics()[-1]["step"] == 20


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda run: run.weights([0, 2]), r"t=\[0, 2\]: times must be in"),
        (lambda run: run.weights(float("nan")), "t=nan: times must be in"),
        (lambda run: run.loss("a\udcffb"), r"the text is not UTF-8 text; correct it: 'a\\udcffb'"),
        (lambda run: run.generate([]), r"prompts=\[\]: there is no text"),
        (lambda run: run.generate(["line", ""]), "the text '' has no tokens"),
        (lambda run: run.generate("line", 0), "max_tokens=0; it must be at least 1"),
        (lambda run: run.generate("line", temperature=-1.0), "temperature=-1.0; it must be 0"),
        (lambda run: run.generate("line", top_p=2.0), "top_p=2.0; it must be above 0"),
        (lambda run: run.evaluate(eval_batches=0), "eval_batches=0; it must be at least 1"),
    ],
)
def test_arguments_that_can_not_be_used(run, call, message):
    with pytest.raises(InputError, match=message):
        call(run)


@pytest.mark.slow
def test_results_say_their_axes(run):
    """They are arrays, and trees of arrays, all the same; what is computed of them is plain."""
    y = run.trajectory("line")
    np.testing.assert_allclose(y.t, [0, 0.5, 1])
    assert y.tokens == ("l", "i", "n", "e")
    assert repr(y).startswith("y(t): [t 3, token 4, width 16]") and "'n', 'e'" in str(y)
    assert type(y[1:]) is np.ndarray and repr(y - y) == repr(np.zeros(y.shape, np.float32))
    np.testing.assert_array_equal(jnp.diff(y, axis=0), np.diff(y, axis=0))
    W = run.weights([0.0, 0.5, 1.0])
    assert W.axes["attention/qkv/kernel"] == ("t", "embed", "maps", "heads", "head_dim")
    assert "W(t) at t = 0, 0.5, 1" in repr(W) and "[t 3, embed 16, mlp 32]" in repr(W)
    at_half = run.weights(0.5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a[1], b, atol=1e-6), dict(W), dict(at_half)
    )
    assert at_half.axes["mlp/up/kernel"] == ("embed", "mlp")


@pytest.mark.slow
def test_off_the_trained_grid_it_warns_once(run):
    trained_run._warn_once.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.evaluate(eval_batches=1)
        assert not caught
        run.at_depth(4).evaluate(eval_batches=1)
        run.at_depth(2, scheme="heun").evaluate(eval_batches=1)
    (warning,) = caught
    assert "trained only with 2 steps of euler" in str(warning.message)
    assert ":smooth" in str(warning.message)


def test_grids_of_a_training():
    tiny = td.load_config("configs/tiny.py", {"train.depths": (2, 4)})
    assert describe_trained_grids(tiny) == "2, 4 and 6 steps of euler"
    assert is_trained_grid(tiny, "euler", 4) and not is_trained_grid(tiny, "heun", 4)
    assert not is_trained_grid(tiny, "euler", 3)
    assert [is_smooth(td.load_config(f"configs/tiny.py{v}")) for v in ("", ":smooth")] == [0, 1]


def test_runs_beside_each_other(run, run_on_lines, tmp_path, capsys):
    """By workdirs or loaded; two workdirs of one name are told apart."""
    other = tmp_path / run_on_lines.name
    shutil.copytree(run_on_lines, other, ignore=shutil.ignore_patterns("checkpoints"))
    compared = td.compare([run, str(other), run_on_lines])
    head, *lines = repr(compared).splitlines()
    assert re.split("  +", head) == list(compared.rows[0])
    assert [line.split()[0] for line in lines] == [str(run_on_lines), str(other)]
    row = compared.rows[0]
    losses = [line["eval/loss"] for line in read_metrics(run_on_lines) if "eval/loss" in line]
    assert (row["last loss"], row["lowest loss"]) == (f"{losses[-1]:.4f}", f"{min(losses):.4f}")
    assert row["steps"] == "20" and row["model"].endswith("2 heads, 2 steps of euler")
    assert f"parameters       {row['parameters']}\n" in repr(run)
    assert float(row["tokens/s"].rstrip("kM")) > 0
    assert compared._repr_html_().count("<tr>") == 3
    assert compared.plot()._repr_png_().startswith(b"\x89PNG")
    (other / "hyperparameters.json").unlink()  # an older run's
    assert td.compare([other]).rows[0]["parameters"] == "-"
    capsys.readouterr()
    td.compare([run_on_lines, other])
    assert not capsys.readouterr().err
    (other / "tokenizer" / "bytes").rename(other / "tokenizer" / "kept")
    SentencePieceTokenizer.train(["Some text, and other text.\n"] * 20, 280).save(
        other / "tokenizer"
    )
    td.compare([other, run_on_lines])
    assert "different tokenizers, so their losses per token can't" in capsys.readouterr().err
    with pytest.raises(InputError, match="holds no run"):
        td.compare([tmp_path / "nothing"])
    with pytest.raises(InputError, match="give at least one workdir"):
        td.compare([])


@pytest.mark.slow
def test_figures(run):
    for figure in (run.plot(), run.plot.weights(), run.plot.states("a\nb"), run.plot.depths([2])):
        assert figure._repr_png_().startswith(b"\x89PNG")
