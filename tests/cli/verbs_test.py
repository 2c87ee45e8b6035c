"""evaluate and generate on a trained run; benchmark on a small model."""

import json
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import call, small_config

import t5x_diffeq as td
from t5x_diffeq.cli import analyze, benchmark, evaluate, generate
from t5x_diffeq.cli.train import train_to_end
from t5x_diffeq.config.config import Config
from t5x_diffeq.data.tokenizer import ByteTokenizer
from t5x_diffeq.inference.sampling import Sampling
from t5x_diffeq.planner import comparison
from t5x_diffeq.planner.program_cost import ProgramCost
from t5x_diffeq.system import console
from t5x_diffeq.system.errors import InputError
from t5x_diffeq.training import load
from t5x_diffeq.training.tracking.jsonl import read_metrics

pytestmark = pytest.mark.in_turns


@pytest.fixture(scope="module")
def workdir(text, tmp_path_factory):
    """A Llama-shaped ODE, trained for three steps on one device."""
    folder = tmp_path_factory.mktemp("run")
    config = small_config(text)
    config.model.update(architecture="llama", num_kv_heads=1)
    config.mesh.fsdp = 1
    config.train.total_steps = 3
    assert train_to_end(Config.of(config), folder / "run") == 0
    return folder / "run"


@pytest.mark.slow
def test_evaluate_is_what_training_reported(workdir, capsys, monkeypatch):
    """And it reads the checkpoint once for all grids."""
    restore_params, restored = load.restore_params, []

    def restore(*arguments):
        restored.append(arguments)
        return restore_params(*arguments)

    monkeypatch.setattr(load, "restore_params", restore)
    call(evaluate, f"--workdir={workdir}", "--num_steps=2,3", "--batch_size=3")
    assert len(restored) == 1
    at_two, at_three = map(json.loads, capsys.readouterr().out.splitlines())
    reported = [line for line in read_metrics(workdir) if "eval/loss" in line][-1]
    for key in ("eval/loss", "eval/perplexity", "eval/bits_per_byte", "eval/tokens"):
        assert at_two[key] == pytest.approx(reported[key], rel=1e-6)
    assert (at_two["num_steps"], at_three["num_steps"], at_two["step"]) == (2, 3, 3)
    assert at_three["eval/loss"] != at_two["eval/loss"]


def test_evaluate_a_part_of_the_split_quietly(finished, capsys):
    try:
        call(evaluate, f"--workdir={finished[1]}", "--eval_batches=2", "--batch_size=8", "--quiet")
    finally:
        console.quiet = False
    out, err = capsys.readouterr()
    assert json.loads(out)["eval/tokens"] == 2 * 8 * 16
    assert err == ""


@pytest.mark.slow
def test_evaluate_by_an_adaptive_solver(workdir, capsys):
    call(evaluate, f"--workdir={workdir}", "--scheme=tsit5", "--rtol=0.1")
    figures = json.loads(capsys.readouterr().out)
    assert (figures["scheme"], figures["rtol"]) == ("tsit5", 0.1)


@pytest.mark.slow
def test_evaluate_over_grids_and_schemes(workdir, tmp_path, capsys):
    figure = tmp_path / "depth.png"
    grids = ["--num_steps=1,2", "--scheme=euler,heun", f"--plot={figure}"]
    call(evaluate, f"--workdir={workdir}", *grids)
    out, err = capsys.readouterr()
    rows = list(map(json.loads, out.splitlines()))
    assert [(row["scheme"], row["num_steps"]) for row in rows] == [
        ("euler", 1),
        ("euler", 2),
        ("heun", 1),
        ("heun", 2),
    ]
    flops = [row["flops_per_token"] for row in rows]
    assert flops[0] < flops[1] < flops[3]
    assert flops[1] == flops[2]  # one step of two stages
    (warning,) = [line for line in err.splitlines() if line.startswith("warning: ")]
    assert "trained only with 2 steps of euler" in warning and ":smooth" in warning
    assert figure.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--num_steps=2,2000000"], "--num_steps='2000000' is not a number of steps"),
        (["--scheme=euler,tsit5"], "--scheme=tsit5 chooses its own steps"),
        (["--plot=depth.gif"], "must end in .png, .pdf or .svg"),
        (["--checkpoint=99"], "checkpoint 99 of .* does not exist; there are 2, 4, 6"),
    ],
)
def test_evaluate_bad_arguments(finished, arguments, message):
    with pytest.raises(InputError, match=message):
        call(evaluate, f"--workdir={finished[1]}", *arguments)


@pytest.mark.slow
def test_generate(workdir, capsys):
    greedy = [f"--workdir={workdir}", "--prompt=line 1", "--temperature=0", "--max_tokens=5"]
    call(generate, *greedy)
    first = capsys.readouterr().out
    call(generate, *greedy, "--seed=7")
    assert capsys.readouterr().out == first
    assert first.startswith("line 1")
    sampled, texts = [*greedy[:2], "--temperature=5", "--max_tokens=5"], []
    for seed in (0, 0, 1):
        call(generate, *sampled, f"--seed={seed}")
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]
    call(generate, *greedy[:2], "--temperature=5", "--max_tokens=5", "--num_steps=4")
    assert capsys.readouterr().out != first


@pytest.mark.slow
def test_generate_several_prompts_until_a_text(workdir, capsys):
    """Each is continued as it is alone, whatever the others' lengths."""
    flags = [f"--workdir={workdir}", "--temperature=0", "--max_tokens=8"]
    prompts = ["line 1", "ab", "the text"]
    alone = []
    for prompt in prompts:
        call(generate, *flags, f"--prompt={prompt}")
        alone.append(capsys.readouterr().out.removesuffix("\n"))
    call(generate, *flags, *(f"--prompt={prompt}" for prompt in prompts))
    out = capsys.readouterr()
    assert [json.loads(line)["text"] for line in out.out.splitlines()] == alone
    assert "tokens/s" in out.err
    stop = alone[0][8:10]
    call(generate, *flags, "--prompt=line 1", f"--stop={stop}")
    assert capsys.readouterr().out == "line 1" + alone[0][6:].split(stop)[0] + "\n"


@pytest.mark.slow
def test_prompts_are_read_by_the_tokenizer(workdir, capsys, monkeypatch):
    """After the opener, which is byte 9 here, in the verbs and in Python."""
    monkeypatch.setattr(ByteTokenizer, "opener", property(lambda _: 9, lambda *_: None), False)
    prompts = []

    def note(model, params, given, *others):
        prompts.append(given)
        return iter(())

    monkeypatch.setattr("t5x_diffeq.inference.sampling.generate", note)
    monkeypatch.setattr("t5x_diffeq.inference.trained_run.generate", note)

    def refuse(model, params, given, *others):
        prompts.append(given)
        raise InputError("nothing is analysed")

    monkeypatch.setattr("t5x_diffeq.analysis.lyapunov_section.lyapunov_section", refuse)
    call(generate, f"--workdir={workdir}", "--prompt=ab")
    assert capsys.readouterr().out == "ab\n"
    td.load(str(workdir)).generate("ab")
    with pytest.raises(InputError, match="nothing is analysed"):
        call(analyze, "--what=lyapunov", f"--workdir={workdir}", "--prompt=ab")
    assert prompts == [[[9, 97, 98]]] * 3


@pytest.mark.slow
def test_generate_stops_at_the_models_length(workdir, capsys):
    call(generate, f"--workdir={workdir}", "--prompt=line 1", "--max_tokens=50")
    assert "--max_tokens=50 is too large: 10 fit after the prompt" in capsys.readouterr().err
    with pytest.raises(InputError, match="has 18 tokens; the model takes 1 to 15: shorten 'ababa"):
        call(generate, f"--workdir={workdir}", "--prompt=" + "ab" * 9)


def test_sampling():
    logits = jnp.log(jnp.array([[0.5, 0.3, 0.2, 0.0]]))
    assert int(Sampling(0.0)(logits, jax.random.key(0))[0]) == 0
    keys = jax.random.split(jax.random.key(0), 2000)

    def frequencies(*how):
        drawn = jax.vmap(lambda key: Sampling(*how)(logits, key)[0])(keys)
        return np.bincount(drawn, minlength=4) / len(keys)

    np.testing.assert_allclose(frequencies(1.0), [0.5, 0.3, 0.2, 0], atol=0.05)
    np.testing.assert_allclose(frequencies(1.0, 2), [0.625, 0.375, 0, 0], atol=0.05)
    np.testing.assert_allclose(frequencies(0.5, 2), [0.735, 0.265, 0, 0], atol=0.05)
    np.testing.assert_allclose(frequencies(1.0, None, 0.6), [0.625, 0.375, 0, 0], atol=0.05)
    np.testing.assert_allclose(frequencies(1.0, None, 0.4), [1, 0, 0, 0], atol=0.05)


class ScriptedSteps(comparison.Candidate):
    """A candidate whose steps take what a list says; the first two, of warming up, are slow."""

    def __init__(self, name, config, depths=None):
        self.name, self.seconds, self.size = name, [], 2 if name == "model" else 1
        timed = [0.1, 0.2, 0.3, 0.4] if name == "model" else [0.1, 0.1, 0.1, 0.1]
        self.script = iter([9.0, 9.0, *timed])
        params = {"P": np.zeros(3 * self.size)}
        self.setup = SimpleNamespace(abstract_state=SimpleNamespace(params=params))
        memory = SimpleNamespace(
            argument_size_in_bytes=4 * self.size, temp_size_in_bytes=5 * self.size
        )
        self.compiled = SimpleNamespace(
            memory_analysis=lambda: memory, as_text=lambda: self.size * "x"
        )

    def step(self):
        self.seconds.append(next(self.script))

    def _count_flops(self):
        return 6 * self.size


def test_every_figure_of_benchmark(small, monkeypatch, capsys):
    """Ratios are of medians; their quartiles are of the ratios within each round."""
    monkeypatch.setattr(comparison, "Candidate", ScriptedSteps)
    cost = lambda text: ProgramCost(7 * len(text), None)  # noqa: E731
    monkeypatch.setattr(comparison, "program_cost", cost)
    benchmark.show_comparison(Config.of(small), {}, 4)
    out, err = capsys.readouterr()
    rest = ("parameters", "state_bytes", "temporary_bytes", "flops", "bytes_accessed")
    sizes = dict(zip(rest, (3, 4, 5, 6, 7), strict=True))
    model, baseline, ratio = map(json.loads, out.splitlines())
    assert model == {
        **{"name": "model", "step_ms": pytest.approx(250.0)},
        "step_ms_quartiles": pytest.approx([175.0, 325.0]),
        **{name: 2 * size for name, size in sizes.items()},
    }
    assert baseline == {
        **{"name": "baseline", "step_ms": 100.0, "step_ms_quartiles": [100.0, 100.0]},
        **sizes,
    }
    assert ratio == {
        **{"name": "model / baseline", "step_ms": pytest.approx(2.5)},
        "step_ms_quartiles": pytest.approx([1.75, 3.25]),
        **dict.fromkeys(rest, 2.0),
    }
    assert [re.split("  +", line.strip()) for line in err.splitlines()[-4:]] == [
        ["step_ms", "step_ms_quartiles", *rest],
        ["model", "250", "175 to 325", "6", "8", "10", "12", "14"],
        ["baseline", "100", "100 to 100", "3", "4", "5", "6", "7"],
        ["model / baseline", "2.500", "1.750 to 3.250", *["2.000"] * 5],
    ]


@pytest.mark.slow
def test_benchmark_compares_equal_work(small):
    small.mesh.fsdp = 1
    *_, ratio = comparison.compare_models(Config.of(small), {}, 2)
    assert ratio["step_ms"] > 0
    assert 1 < ratio["flops"] < 2  # the solver's work is the same; the hypernetwork's comes on top
    assert ratio["parameters"] > 1


@pytest.mark.slow
def test_benchmark_against_other_configs(small):
    small.mesh.fsdp = 1
    config = Config.of(small)
    wider = config.with_values({"model.mlp_dim": 64})
    model, other, ratio = comparison.compare_models(config, {"wider": wider}, 2)
    assert (other["name"], ratio["name"]) == ("wider", "model / wider")
    assert model["parameters"] < other["parameters"]


@pytest.mark.slow
def test_benchmark_of_adapters(small):
    small.mesh.fsdp = 1
    small.model.update(weights="per_layer", adapter_rank=1)
    small.train.trainable = ("adapters", "embeddings")
    adapted, full, ratio = comparison.compare_models(Config.of(small), {}, rounds=2)
    assert (full["name"], ratio["name"]) == ("full", "model / full")
    assert ratio["state_bytes"] < 1 < ratio["parameters"]
    assert adapted["flops"] < full["flops"]
