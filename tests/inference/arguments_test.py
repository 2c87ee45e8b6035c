"""What the functions of the Python interface are given wrongly."""

import copy
import pickle
import re
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import FrozenInstanceError
from os import PathLike
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import t5x_diffeq as td
from t5x_diffeq.checkpoints.workdir import read_config
from t5x_diffeq.cli import train as train_verb
from t5x_diffeq.cluster.signals import StopSignals
from t5x_diffeq.system.arguments import checked
from t5x_diffeq.system.errors import InputError


@checked
def example(
    text: str | PathLike = "",
    count: int | None = 1,
    rate: float = 0.5,
    flag: bool = False,
    names: list[str] = [],  # noqa: B006
    numbers: float | Sequence[float] | np.ndarray | jax.Array = 0,
    pair: tuple[int, str] = (1, ""),
    values: Mapping[str, object] | None = None,
    which: int | Literal["best"] = "best",
    call: Callable | None = None,
) -> str:
    """An example.

    Args:
      text: a file's name, or
        its path.
      count: how many.
    """
    return "called"


@pytest.mark.parametrize(
    "given",
    [
        {"text": Path("a"), "count": np.int64(3), "rate": np.float32(1), "flag": True},
        {"rate": 1, "names": ("a",), "numbers": [1, np.float32(2)], "which": 1000},
        {"numbers": np.ones((2, 2)), "values": {"a": 1}, "call": len, "count": None},
        {"numbers": jnp.ones(2), "pair": (1, "a"), "names": []},
    ],
)
def test_what_an_annotation_allows(given):
    assert example(**given) == "called"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"text": None}, "text=None; it must be a text or a path (a file's name, or its path)"),
        ({"text": b"a"}, "text=b'a'; it must be a text or a path (a file's name, or its path)"),
        ({"count": "3"}, "count='3'; it must be a whole number or None (how many)"),
        ({"count": True}, "count=True; it must be a whole number or None (how many)"),
        ({"rate": "0.5"}, "rate='0.5'; it must be a number"),
        ({"flag": "False"}, "flag='False'; it must be True or False"),
        ({"names": "abc"}, "names='abc'; it must be a list of texts"),
        ({"names": ["a", None]}, "names=['a', None]; it must be a list of texts"),
        (
            {"numbers": np.array(["a"])},
            "numbers=array(['a'], dtype='<U1'); it must be a number, a list of numbers or an array",
        ),
        ({"pair": ("a", 1)}, "pair=('a', 1); it must be a tuple of whole numbers"),
        ({"values": {3: 1}}, "values={3: 1}; it must be a dict or None"),
        ({"which": "1000"}, "which='1000'; it must be a whole number or 'best'"),
        ({"call": "len"}, "call='len'; it must be a function or None"),
        (
            {"text": object},
            "text=<class 'object'>; it must be a text or a path (a file's name, or ",
        ),
        ({"rate": td.Sampling()}, "rate=Sampling(temperature=1.0, top_k=None, top_p=1.0); it must"),
        ({"names": "x" * 99}, f"names='{'x' * 59}...; it must be a list of texts"),
    ],
)
def test_what_it_does_not_allow(given, said):
    with pytest.raises(InputError) as caught:
        example(**given)
    assert str(caught.value).startswith(said)


def test_an_argument_that_does_not_exist():
    with pytest.raises(
        TypeError, match=r"example\(\): got an unexpected keyword argument 'name'; "
    ):
        example(name="a")
    with pytest.raises(TypeError, match=r"it takes workdir, num_steps=, scheme=, checkpoint=, "):
        td.load("w", 6)
    with pytest.raises(AttributeError, match=r"has no attribute 'generate'; it has .*load\(WORKD"):
        td.generate("a")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda config: setattr(config, "seed", 3), "config.with_values({'seed': 3}) returns"),
        (lambda config: setattr(config.train, "total_steps", 3), "with_values({'train.total_st"),
    ],
)
def test_a_config_says_how_to_change_it(change, said):
    with pytest.raises(FrozenInstanceError, match=re.escape(said)):
        change(td.Config())


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: td.load_config(None), "file=None; it must be a text or a path"),
        (lambda: td.load_config("configs/tiny.py", "compact"), "a variant is part of `file`"),
        (
            lambda: td.load_config("configs/tiny.py", {"train": 3}),
            "'train' is a section of the con",
        ),
        (lambda: td.train(td.Config(), None), "workdir=None; it must be a text or a path"),
        (lambda: td.train(td.Config(), "gs:/b/w"), "workdir=gs:/b/w names no bucket; write gs://"),
        (lambda: td.Config(train={"seed": 3}), "train={'seed': 3}; it must be a TrainKeys; load_c"),
        (
            lambda: td.Config().with_values({"train.total_step": 3}),
            "config key 'train.total_step' does not exist; did you mean train.total_steps?",
        ),
        (lambda: td.train(td.Config(), ""), "workdir is empty; give a path"),
        (lambda: td.train("configs/tiny.py", "w"), "it must be a Config or a ConfigDict"),
        (lambda: td.train(td.Config(), __file__), "that is a file, so name a folder"),
        (lambda: td.load(""), "workdir is empty; give a path"),
        (lambda: td.load("w", checkpoint="1000"), "it must be a whole number, 'best' or None"),
        (lambda: td.compare("examples/smooth"), "it must be a list of texts, paths or TrainedRuns"),
        (lambda: td.Sampling(temperature="hot"), "it must be a number (temperature of the softmax"),
        (lambda: td.grid("euler", 10**12), "integration takes 1 to 10000 steps"),
        (lambda: td.Scheme(None, (1.0,), 1, (1, 1)), "step=None; it must be a function"),
        (lambda: integrate(field=td.VectorField(None, None)), "its f and g must be functions"),
        (lambda: integrate(field=lambda t, y: None), "field gives None, where dy/dt has the shape"),
        (
            lambda: integrate(field=lambda t, y: jnp.ones(3)),
            "field gives ShapeDtypeStruct(shape=(3,), dtype=float32), where dy/dt has the",
        ),
        (lambda: integrate(field=lambda y, t: y), "field takes (y, t); the weights come first"),
        (lambda: integrate(field=lambda y: y), "field takes (y); it must take W and y"),
        (lambda: integrate(weights=[1.0, 1.0]), "a list is a tree of leaves, so give an array"),
        (
            lambda: integrate(y=jnp.ones(2, jnp.bfloat16), field=lambda t, y: t * y),
            "field gives float32, and y is bfloat16; give y and the weights one dtype",
        ),
        (lambda: integrate(weights=None), "the weights None have no leaf"),
        (lambda: td.load_config("configs/finetune.py:full"), "give it to `python -m t5x_diffeq.fi"),
        (
            lambda: td.train(td.Config(init_from="w"), "nowhere/new"),
            "begins with another run's model (config.init_from); give it to `python -m t5x_diffeq",
        ),
        (
            lambda: td.load_config("configs/tiny.py", {"train.seed": 1, "train": {"seed": 2}}),
            "train.seed is given twice, as 1 and as 2",
        ),
        (lambda: td.load_config("w/config.json"), "w/config.json: there is no such file"),
        (lambda: integrate(y="one"), "y='one'; it must be a number, a list of numbers or an array"),
    ],
)
def test_the_interface_checks_what_it_gets(call, said):
    with pytest.raises(InputError) as caught:
        call()
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("use", "said"),
    [
        (lambda c: c["train.total_steps"], "write config.train.total_steps, or config.flat()['tra"),
        (lambda c: c.update({}), "no attribute 'update'; with_values({'train.total_steps': 100})"),
        (lambda c: c.train.steps, "'train.steps' does not exist; did you mean train.total_steps?"),
        (lambda c: c.lr, "'lr' does not exist; did you mean optimizer.learning_rate?"),
        (lambda c: c.__setitem__("seed", 1), "with_values({'seed': 1}) returns one with the other"),
    ],
)
def test_a_config_says_how_to_read_it(use, said):
    with pytest.raises((AttributeError, TypeError), match=re.escape(said)):
        use(td.Config())


def test_a_config_is_copied_and_pickled():
    config = td.Config()
    assert copy.deepcopy(config) == pickle.loads(pickle.dumps(config)) == config
    assert not hasattr(config, "items")


def integrate(**other):
    given = {"field": lambda t, y: y, "weights": lambda t: t, "y": [1, 2]}
    return td.integrate(**{**given, **other}, num_steps=2)


def test_a_scheme_itself_can_be_given():
    euler = td.Scheme(lambda F, W, y, dt: y + dt * F(W[0], y), (1.0,), 1, (1, 1))
    given = {"field": lambda t, y: t * y, "weights": lambda t: t, "y": 1.0, "num_steps": 2}
    assert td.integrate(**given, scheme=euler) == td.integrate(**given, scheme="euler")


def test_whole_numbers_are_a_state():
    np.testing.assert_allclose(integrate(), [2.25, 4.5])


def test_values_of_other_types():
    """Of NumPy and JAX, and nested as in a config file."""
    values = {"train": {"total_steps": np.int64(5)}, "model.dtype": jnp.bfloat16}
    config = td.load_config(Path("configs/tiny.py"), values)
    assert (config.train.total_steps, config.model.dtype) == (5, "bfloat16")
    assert type(config.train.total_steps) is int
    config = td.load_config(
        "configs/tiny.py", {"data.source": "text_files", "data.path": Path("a")}
    )
    assert config.data.path == "a"
    values = {"model.dtype": np.dtype("float32"), "train.depths": np.array([2, 4])}
    config = td.load_config("configs/tiny.py", values)
    assert (config.model.dtype, config.train.depths) == ("float32", (2, 4))


def test_a_run_can_not_be_pickled(run_on_lines):
    run = td.load(run_on_lines)
    with pytest.raises(TypeError, match=f"pass its workdir, '{run_on_lines}', and call td.load "):
        pickle.dumps(run)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda run: run.generate(3), "prompts=3; it must be a text or a list of texts"),
        (lambda run: run.generate("a", seed=2**70), "it must be at least 0 and below 4294967296"),
        (
            lambda run: run.generate("a", sampling=td.Sampling(), temperature=0.1),
            "sampling=Sampling(temperature=1.0, top_k=None, top_p=1.0) says it all; leave temp",
        ),
        (lambda run: run.weights(np.ones((2, 1))), "t has the shape (2, 1); give a number or a"),
        (lambda run: run.weights(0.5)["nope"], "'nope': there are attention, "),
        (lambda run: run.weights(0.5)["mlp/up/kernel"], "write W['mlp']['up']['kernel']"),
        (lambda run: run.params, "no attribute 'params'; it has at_depth, config, "),
        (lambda run: run.tokenizer.decode([72, 999]), "tokens has 999; the tokens of this vocabul"),
        (lambda run: run.tokenizer.decode([-1]), "tokens has -1; the tokens of this vocabulary ar"),
        (
            lambda run: td.compare([run, run.at_depth(5)]),
            "at 5 steps, which is the same training; run.plot.depths() compares numbers of steps",
        ),
    ],
)
def test_a_run_checks_what_it_gets(call, said, run_on_lines):
    with pytest.raises((InputError, KeyError, AttributeError)) as caught:
        call(td.load(run_on_lines))
    assert said in str(caught.value.args[0])


def test_no_figure_of_losses_without_losses(run_on_lines, monkeypatch):
    run = td.load(run_on_lines)
    monkeypatch.setattr("t5x_diffeq.inference.trained_run.read_metrics", lambda workdir: [])
    with pytest.raises(InputError, match=r"no loss has been reported yet; .* metrics\.jsonl"):
        run.plot()


@pytest.mark.parametrize("call", [lambda x: td.load(x), lambda x: td.compare([x]), read_config])
def test_a_hugging_face_folder_is_no_run(call, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(
        InputError, match=rf"is a Hugging Face folder, .*convert --input={tmp_path} "
    ):
        call(tmp_path)


def test_an_interrupt_is_raised_again_once_the_run_is_saved(tmp_path, monkeypatch):
    monkeypatch.setattr(train_verb, "train_to_end", lambda config, workdir: 130)
    with pytest.raises(KeyboardInterrupt, match=rf"load\('{tmp_path}'\) loads it"):
        td.train(td.Config(), tmp_path)
    monkeypatch.setattr(train_verb, "train_to_end", lambda config, workdir: 42)
    with pytest.raises(SystemExit, match="42"):
        td.train(td.Config(), tmp_path)


def test_a_thread_gets_no_signals(capsys):
    before = signal.getsignal(signal.SIGINT)

    def train():
        with StopSignals() as stop:
            assert not stop.should_stop() and signal.getsignal(signal.SIGINT) is before
            ended.append(stop)

    ended = []
    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert len(ended) == 1 and "Ctrl-C and SIGTERM won't save the run" in capsys.readouterr().err
