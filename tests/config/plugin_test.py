"""A package outside the project goes through every verb, with no file of the project changed."""

import dataclasses
import json
import os

import pytest
import warm_python
from compilation import flags_of_processes
from helpers import SUPPORT, call, run_to_end, small_config

import t5x_diffeq as td
from configs import finetune as finetune_config
from t5x_diffeq.checkpoints.workdir import read_config
from t5x_diffeq.cli import analyze, evaluate, export, generate
from t5x_diffeq.cli.finetune import finetune
from t5x_diffeq.cli.train import train_to_end
from t5x_diffeq.config import plugins
from t5x_diffeq.config.config import Config, flatten
from t5x_diffeq.config.plugins import make_plugin
from t5x_diffeq.data.named_source import load_source
from t5x_diffeq.model.ode import solvers
from t5x_diffeq.model.ode.solvers import find_scheme
from t5x_diffeq.system.errors import InputError
from t5x_diffeq.training.tracking.jsonl import read_metrics

pytestmark = pytest.mark.in_turns
PACKAGE = SUPPORT / "plugin_package"
PARTS = "diffeq_plugin.parts"


@pytest.fixture(autouse=True)
def on_the_path(monkeypatch):
    monkeypatch.syspath_prepend(PACKAGE)


class WithInit:
    """A class that doesn't take what it is called with."""

    def __init__(self, config):
        self.config = config


def config_of(**model):
    config = small_config("unused")
    config.model.update(block=f"{PARTS}:SquaredBlock", **model)
    config.data.update(source=f"{PARTS}:documents(count=100)", path=None)
    config.optimizer.name = f"{PARTS}:make_sign(momentum=0.8)"
    config.optimizer.learning_rate = 1e-3
    return config


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plugin") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(PACKAGE)
        assert train_to_end(Config.of(config_of(architecture="llama")), folder) == 0
    return folder


@pytest.mark.slow
def test_training_and_the_record(workdir):
    """config.json says what the module was; training learned something."""
    recorded = json.loads((workdir / "config.json").read_text())
    assert recorded["plugins"].keys() == {"diffeq_plugin"}
    assert recorded["plugins"]["diffeq_plugin"].startswith("sha256 ")
    assert recorded["model"]["block"] == f"{PARTS}:SquaredBlock"
    losses = [line["eval/loss"] for line in read_metrics(workdir) if "eval/loss" in line]
    assert losses[-1] < losses[0]


@pytest.mark.slow
def test_another_version_is_told_once(workdir, monkeypatch, capsys):
    monkeypatch.setattr(plugins, "_identify", lambda module: "diffeq_plugin 2.0")
    read_config(workdir), read_config(workdir)
    told = capsys.readouterr().err
    assert told.count("note: diffeq_plugin is diffeq_plugin 2.0, and the run was made with") == 1


@pytest.mark.slow
def test_evaluate_generate_and_python(workdir, capsys):
    call(evaluate, f"--workdir={workdir}", "--num_steps=2,4", "--batch_size=8")
    two, four = map(json.loads, capsys.readouterr().out.splitlines())
    assert two["eval/loss"] != four["eval/loss"] and two["flops_per_token"] > 0
    call(generate, f"--workdir={workdir}", "--prompt=line", "--max_tokens=4", "--temperature=0")
    printed = capsys.readouterr().out
    run = td.load(workdir)
    greedy = td.Sampling(temperature=0)
    assert printed.startswith(run.generate("line", max_tokens=4, sampling=greedy))


@pytest.mark.slow
def test_analyze(workdir, tmp_path, capsys):
    call(analyze, "--what=spectra", f"--workdir={workdir}", f"--output={tmp_path}", "--times=3")
    numbers = json.loads(capsys.readouterr().out.splitlines()[0])
    assert {name.partition("/")[0] for name in numbers} == {"qk", "ov", "squared"}


@pytest.mark.slow
def test_finetune(workdir, tmp_path):
    """At another number of steps, with adapters on the block's own linears."""
    given = finetune_config.get_config("lora")
    given.update(init_from=str(workdir))
    given.model.update(num_steps=3, adapter_rank=2)
    given.data.update(source=f"{PARTS}:documents", cross_documents=False)
    given.train.update(total_steps=2, batch_size=8, eval_batch_size=16)
    assert finetune(flatten(given), tmp_path / "tuned") == 0
    weights = td.load(tmp_path / "tuned")._apply(lambda model: model.weights())
    assert "widen" in weights["adapters"] and weights["widen"]["kernel"].shape[0] == 3


@pytest.mark.slow
def test_verbs_refuse_a_block_without_their_method(tmp_path, capsys):
    """They name the method, before the checkpoint is read."""
    config = config_of()
    config.model.block = f"{PARTS}:SilentBlock"
    config.train.update(total_steps=1)
    assert train_to_end(Config.of(config), tmp_path / "run") == 0
    for verb, arguments, message in (
        (analyze, ["--what=spectra", f"--output={tmp_path}"], "spectra needs .*`spectral_factors`"),
        (export, [f"--output={tmp_path / 'out'}"], "export needs the method `pytorch_form`"),
        (generate, ["--prompt=a"], "generation needs the method `extend`"),
    ):
        with pytest.raises(InputError, match=message):
            call(verb, *arguments, f"--workdir={tmp_path / 'run'}")
    call(evaluate, f"--workdir={tmp_path / 'run'}", "--batch_size=8", "--num_steps=1,2")
    printed = capsys.readouterr()
    assert "flops_per_token" not in printed.out and printed.err.count("unknown") == 2


def test_the_packages_scheme():
    """A function instead of a scheme, and a scheme that miscounts, are refused."""
    assert find_scheme(f"{PARTS}:ralston").nodes == (0.0, 2 / 3)
    with pytest.raises(InputError, match=r"returns a NoneType; it must return a .*\.Scheme"):
        find_scheme(f"{PARTS}:make_nothing")
    with pytest.raises(InputError, match=r"can't be made: .*; its own .*make_with\(nodes=...\)"):
        find_scheme(f"{PARTS}:make_with")
    with pytest.raises(InputError, match=r"is not called, because .*; make a scheme of a step: Sc"):
        find_scheme(f"{PARTS}:unannotated")
    with pytest.raises(InputError, match=r"is a Scheme, and model.scheme names such"):
        make_plugin("model.weights", f"{PARTS}:ralston", td.WeightSource)
    with pytest.raises(InputError, match=r"it is called with size; declare its own arguments as"):
        make_plugin("model.block", f"{__name__}:WithInit", WithInit, size=4)
    with pytest.raises(InputError, match=r"evaluates f and g \(1, 1\) times, .* \(2, 2\) times"):
        find_scheme(f"{PARTS}:miscounted")
    with pytest.raises(InputError, match=r"can't take a step: IndexError: tuple index .*parts.py"):
        find_scheme(f"{PARTS}:reads_too_much")
    with pytest.raises(InputError, match=r"take the weights of one node, W\[i\], and not all of W"):
        find_scheme(f"{PARTS}:reads_all")


def test_a_scheme_of_no_order(monkeypatch):
    scheme = solvers.Scheme(solvers.euler, nodes=(1.0,), order=-1, evaluations=(1, 1))
    monkeypatch.setattr(solvers, "make_plugin", lambda *_: scheme)
    with pytest.raises(InputError, match="has order=-1; it must be at least 1, or None"):
        find_scheme("own:scheme")


def test_the_packages_documents():
    data = Config.of(config_of()).data
    source = load_source(data)
    assert (len(source.train), len(source.validation)) == (80, 20)
    assert source.fingerprint == load_source(data).fingerprint
    for name, loss_on, message in (
        ("splits_by_name", "all", "returns a dict; it must return .* two nonempty sequences"),
        ("two_texts", "all", "returns a tuple; it must return .* two nonempty sequences"),
        ("numbers", "all", "its documents are of type int, not str"),
        ("half_characters", "all", r"a document holds '.ud800', half of a character"),
        ("by_label", "all", "entries can't be had by their number .*; return lists"),
        ("generators", "all", "returns a tuple; it must return .* two nonempty sequences"),
        ("failing", "all", r"failing fails: ZeroDivisionError: .*parts.py, line \d+"),
        ("documents", "completion", "data.loss_on=completion doesn't fit .*, which returns texts"),
    ):
        other = dataclasses.replace(data, source=f"{PARTS}:{name}", loss_on=loss_on)
        with pytest.raises(InputError, match=message):
            load_source(other)


@pytest.mark.slow
def test_the_command_line(tmp_path):
    """Train with the package's scheme by the verbs themselves, then evaluate, in new processes."""
    flags = (
        f"--config.model.block={PARTS}:SquaredBlock(power=3)",
        f"--config.model.scheme={PARTS}:ralston",
        f"--config.data.source={PARTS}:documents",
        *("--config.data.tokenizer=bytes", "--config.data.sequence_length=32"),
        *("--config.model.embed_dim=32", "--config.train.total_steps=3"),
        *("--config.train.eval_batches=1", "--config.train.eval_all_at_end=False"),
    )
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE), "XLA_FLAGS": flags_of_processes()}

    def run(verb, *arguments, env=environment):
        command = [warm_python.executable(), "-m", f"t5x_diffeq.{verb}", *arguments]
        return run_to_end(command, env=env)

    workdir = f"--workdir={tmp_path / 'run'}"
    ended = run("train", "--config=configs/tiny.py", workdir, *flags)
    assert ended.returncode == 0, ended.stderr
    assert f"evaluate {workdir} --trust_plugins" in ended.stderr
    ended = run("evaluate", workdir, "--batch_size=8")
    assert ended.returncode == 2 and "add --trust_plugins" in ended.stderr, ended.stderr
    ended = run("evaluate", workdir, "--batch_size=8", "--trust_plugins")
    assert ended.returncode == 0 and json.loads(ended.stdout)["eval/loss"] > 0, ended.stderr
    ended = run("generate", workdir, "--trust_plugins", "--prompt=line", "--max_tokens=3")
    assert ended.returncode == 0 and ended.stdout.startswith("line"), ended.stderr
    ended = run("evaluate", workdir, "--trust_plugins", env={**os.environ, "PYTHONPATH": ""})
    assert ended.returncode == 2
    assert "diffeq_plugin.parts can't be imported" in ended.stderr.splitlines()[-1]
