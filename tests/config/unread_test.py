"""Notes on given values that have no effect."""

import jax
import jax.numpy as jnp
import pytest
from helpers import call

from t5x_diffeq.cli import generate, sweep
from t5x_diffeq.config.config import KEYS, Config
from t5x_diffeq.config.config_files import load_config
from t5x_diffeq.config.unread import UNREAD, notes
from t5x_diffeq.model.config import ModelConfig
from t5x_diffeq.model.language_model import LanguageModel
from t5x_diffeq.system.errors import InputError

_OTHERS = {  # of each key, a value that isn't its default
    "model.time_basis": "legendre:3",
    "model.time_embedding": "common",
    "model.init": "paper",
    "model.adapter_kernels": ("up",),
    "model.norm_shift": True,
    "optimizer.momentum": 0.5,
    "data.data_dir": "folder",
    "data.text_field": "content",
    "data.max_unreadable": 0.5,
}
_SMALL = {
    "model.attention": "xla",
    "model.embed_dim": 8,
    "model.num_heads": 2,
    "model.mlp_dim": 8,
    "model.num_steps": 2,
}


def _value_of(key):
    """A value of the key that isn't its default, and with which the model is valid for GPT."""
    if key in ("model.tied_head", "model.qkv_bias", "model.rope_theta"):
        return KEYS[key].default  # GPT refuses others
    return _OTHERS.get(key, 9)


def _program(config):
    """The program that makes a model's parameters and its logits."""
    model = LanguageModel(ModelConfig.of(config.model, 16, 4))
    return str(jax.make_jaxpr(model.init)(jax.random.key(0), jnp.zeros((1, 4), jnp.int32)))


@pytest.mark.parametrize("row", UNREAD, ids=lambda row: f"{row.other}")
def test_a_key_is_named_where_it_does_nothing_and_only_there(row):
    """It is, in the model's own program, exactly then."""
    unread = row.values.choices[0].replace(":k", ":4") if row.values.choices else 0
    config = Config().with_values({**_SMALL, row.other: unread})
    program = _program(config)
    for key in row.keys:
        changed = config.with_values({key: _value_of(key)})
        (line,) = notes(changed.flat(), [key])
        assert line.startswith(f"note: {key}={_value_of(key)} does nothing with {row.other}=")
        assert not list(notes(changed.flat(), ()))
        assert key[:5] != "model" or _program(changed) == program, key


@pytest.mark.parametrize(
    ("other", "key", "value"),
    [
        ("model.weights=time_dependent", "model.time_embed_dim", 3),
        ("model.weights=package.module:Name", "model.time_embed_dim", 3),
        ("optimizer.name=muon", "optimizer.momentum", 0.9),
        ("data.tokenizer=tokenizer.json", "data.tokenizer_vocab_size", 99),  # `plan` reads it
    ],
)
def test_no_note_on_what_is_read(other, key, value):
    name, _, text = other.partition("=")
    config = Config().with_values({name: text, key: value})
    assert not list(notes(config.flat(), [key]))


def test_every_key_of_the_table_changes_the_model_elsewhere():
    """So none is in the table that no model reads."""
    for key in UNREAD[0].keys:
        before = Config().with_values(_SMALL)
        assert _program(before.with_values({key: _value_of(key)})) != _program(before), key


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"train.milestones": (10, 9000)}, "train.milestones=[9000] come after train.total_steps"),
        (
            {"train.keep_best": 2, "train.checkpoint_every": 7, "train.eval_every": 5},
            "train.keep_best=2 chooses among checkpoints that are evaluated, and train.checkpoint",
        ),
        ({"train.log_every": 9000}, "train.log_every=9000 is more than train.total_steps=2000, so"),
        ({"model.remat": "keep:mlp,fp8"}, "model.remat=keep:mlp,fp8 keeps no fp8 inputs with"),
        (
            {"optimizer.role_multipliers": (("adapter", 2.0),)},
            "optimizer.role_multipliers names adapter, of which the model has no parameters with ",
        ),
        (
            {"data.text_field": "content", "data.path": "mine.txt"},
            "data.text_field=content does nothing with data.path=mine.txt",
        ),
    ],
)
def test_values_that_do_less_than_they_seem_to(values, line):
    config = Config().with_values(values)
    assert [text for text in notes(config.flat(), values) if line in text]
    assert not list(notes(config.flat(), ()))


def test_python_says_it_too(capsys):
    load_config("configs/tiny.py", {"optimizer.momentum": 0.9})
    assert "optimizer.momentum=0.9 does nothing with optimizer.name=adam" in capsys.readouterr().err
    load_config("configs/tiny.py:baseline")  # whose file sets keys of W(t)
    assert not capsys.readouterr().err


def test_a_sweep_says_each_note_once(tmp_path, capsys):
    """Whatever the number of points."""
    grid = ("--grid=model.time_embed_dim=3,4", "--grid=optimizer.learning_rate=1e-3,2e-3")
    words = ("--config=configs/tiny.py:baseline", "--dry_run")
    assert call(sweep, *words, *grid, f"--output={tmp_path}") in (None, 0)
    said = [line for line in capsys.readouterr().err.splitlines() if "does nothing with" in line]
    assert [line.split()[1] for line in said] == [
        "model.time_embed_dim=3",
        "model.time_embed_dim=4",
    ]


@pytest.mark.parametrize("flag", ["top_k", "top_p"])
def test_sampling_that_a_temperature_of_0_turns_off(flag, tmp_path, capsys):
    for temperature, is_said in ((0, True), (1, False)):
        with pytest.raises(InputError, match="holds no run"):
            words = (f"--workdir={tmp_path}", "--prompt=a", f"--{flag}=1")
            call(generate, *words, f"--temperature={temperature}")
        said = f"note: --{flag} does nothing with --temperature=0"
        assert (said in capsys.readouterr().err) == is_said
