"""What comes from somebody else names no code: a workdir, adapters, a folder of weights."""

import io
import json
import os
import shutil

import numpy as np
import pytest
from helpers import call

import t5x_diffeq as td
from configs import finetune as finetune_config
from t5x_diffeq.checkpoints.workdir import check_config, read_config
from t5x_diffeq.cli import analyze, evaluate, explore, export, generate
from t5x_diffeq.cli import train as train_verb
from t5x_diffeq.cli.finetune import finetune
from t5x_diffeq.config import plugins
from t5x_diffeq.config.config import KEYS, Config, flatten
from t5x_diffeq.config.keys.values import reads_as_data
from t5x_diffeq.model.ode.solvers import find_scheme
from t5x_diffeq.system.errors import InputError
from t5x_diffeq.training.optimizers.optimizer import make_optimizer
from t5x_diffeq.training.progress import log_next_commands
from t5x_diffeq.training.teacher import check_teacher

SHELL = "subprocess:run(args='touch pwned', shell=True)"
READ_AS_DATA = {  # keys with texts that are looked up, or name what is read as data
    *("init_from", "train.distill_from", "train.sample_prompts"),
    *("data.path", "data.validation_path", "data.text_field", "data.data_dir", "data.tokenizer"),
    *("data.train_split", "data.validation_split", "data.end_of_text"),
    *("optimizer.role_multipliers", "mesh.rules", "model.rope_scaling", "model.adapter_kernels"),
}
ASKED = rf"names code of other packages, which would be run: model.scheme={'.*'}; if you trust it"


@pytest.fixture(autouse=True)
def nothing_trusted(monkeypatch, tmp_path):
    monkeypatch.setattr(plugins, "trust_all", False)
    monkeypatch.setattr(plugins, "_trusted", set())
    monkeypatch.chdir(tmp_path)
    yield
    assert not (tmp_path / "pwned").exists()


@pytest.fixture
def foreign(finished, tmp_path):
    """A whole run whose config names a command as its scheme."""
    folder = tmp_path / "foreign"
    shutil.copytree(finished[1], folder)
    change(folder, "model", scheme=SHELL)
    return folder


def change(folder, section, **values):
    config = json.loads((folder / "config.json").read_text())
    (config[section] if section else config).update(values)
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("verb", "arguments"),
    [
        (evaluate, ["--workdir=foreign"]),
        (generate, ["--workdir=foreign", "--prompt=a"]),
        (analyze, ["--workdir=foreign", "--what=spectra", "--output=out"]),
        (explore, ["--workdir=foreign", "--port=0"]),
        (export, ["--workdir=foreign", "--output=out"]),
        (train_verb, ["--branch_from=foreign", "--workdir=b"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_a_verb_asks_before_it_runs_the_code_of_a_workdir(foreign, verb, arguments):
    with pytest.raises(InputError, match=ASKED):
        call(verb, *arguments)


def test_tuning_and_teachers_ask_before_they_run_code(foreign, tmp_path):
    given = flatten(finetune_config.get_config("full"))
    with pytest.raises(InputError, match=ASKED):
        finetune({**given, "init_from": str(foreign)}, tmp_path / "tuned")
    with pytest.raises(InputError, match=ASKED):
        check_teacher(Config().with_values({"train.distill_from": str(foreign)}))


def test_python_asks_too_and_even_then_calls_no_shell(foreign):
    with pytest.raises(InputError, match=ASKED):
        td.load(foreign)
    with pytest.raises(InputError, match="is not called, because it doesn't say that it returns"):
        td.load(foreign, trust_plugins=True)


def test_what_a_person_has_named_is_not_asked_for(foreign):
    plugins.trust({"model.scheme": SHELL})
    assert read_config(foreign).model.scheme == SHELL
    plugins._trusted.clear()
    assert read_config(foreign, trust_plugins=True).model.scheme == SHELL
    assert read_config(foreign).model.scheme == SHELL  # by now a person has


def test_the_packages_block_needs_no_trust(foreign):
    own = "t5x_diffeq.model.parallel_block:ParallelBlock"
    change(foreign, "model", scheme="euler", block=own)
    assert read_config(foreign).model.block == own
    remove = "t5x_diffeq.system.files:remove_folder(folder='foreign')"
    for other in ("examples.own_scheme:ralston", remove):
        change(foreign, "model", scheme=other)
        with pytest.raises(InputError, match=ASKED):
            read_config(foreign)


def test_every_key_that_can_name_code_is_asked_for(foreign):
    change(foreign, "model", scheme="euler", block="os:abort")
    change(foreign, "optimizer", name="os:abort")
    change(foreign, "data", source="os:abort")
    change(foreign, "train", hooks=["os:abort"])
    with pytest.raises(InputError) as raised:
        read_config(foreign)
    for key in ("model.block", "optimizer.name", "data.source", "train.hooks"):
        assert f"{key}=os:abort" in str(raised.value)


def test_every_key_leads_to_no_code_or_is_asked_for(foreign):
    """A new key that takes any text is asked for, unless it says that its texts are data."""
    for name, key in KEYS.items():
        texts = [SHELL, "theirs/folder", "theirs.jinja", "theirs.yaml"]
        values = [text for text in texts if key.values.fault(text) is None]
        values += [(text,) for text in texts if key.values.fault((text,)) is None]
        for value in values if name not in (*READ_AS_DATA, "data.mixture") else ():
            with pytest.raises(InputError, match=rf"names code of .*: {name}=.*; if you trust it"):
                plugins.check_trusted({name: value}, foreign)
        plugins.check_trusted({name: key.default}, foreign)
    harmless = {name for name, key in KEYS.items() if key.asks is reads_as_data}
    assert harmless == READ_AS_DATA


@pytest.mark.parametrize(
    ("section", "values"),
    [
        ("data", {"chat_template": "their.jinja"}),
        ("data", {"source": "mixture", "mixture": [[1, "tokens", "x"], [1, "os:abort", "x"]]}),
        ("model", {"block": "t5x_diffeq.model.parallel_block_of_theirs:ParallelBlock"}),
        ("model", {"block": "t5x_diffeq.model.parallel_block:ParallelBlockOfTheirs"}),
    ],
)
def test_a_branch_asks_before_it_follows_names_of_code(foreign, section, values):
    change(foreign, "model", scheme="euler")
    change(foreign, section, **values)
    key, value = list(values.items())[-1]
    asked = "os:abort" if key == "mixture" else value
    with pytest.raises(InputError, match=rf"names code of .*: {section}.{key}={asked}; if you"):
        call(train_verb, "--branch_from=foreign", "--workdir=b")
    plugins.trust({f"{section}.{key}": value})
    assert read_config(foreign).flat()[f"{section}.{key}"]


def test_a_training_asks_before_others_run_a_part_of_a_mixture(finished, foreign):
    """launch/local.sh then trusts the workdir. This key may differ from what is given."""
    given = Config.of(finished[0])
    parts = [[1, "tokens", "x"], [1, "os:abort", "x"]]
    change(foreign, "model", scheme=given.model.scheme)
    change(foreign, "data", source="mixture", mixture=parts)
    mine = given.with_values({"data.source": "mixture", "data.mixture": parts[:1]})
    with pytest.raises(InputError, match=r"names code of .*: data.mixture=os:abort; if you"):
        check_config(mine, foreign)


@pytest.mark.parametrize("part", [5, None, [], {"a": 1}])
def test_a_part_of_a_mixture_that_is_none_leads_nowhere(part):
    assert plugins.foreign_plugins({"data.mixture": [part]}) == []


def test_a_name_is_trusted_for_the_key_that_it_was_given_for(foreign):
    plugins.trust({"train.hooks": [SHELL], "data.path": "texts"})
    with pytest.raises(InputError, match=ASKED):
        read_config(foreign)


def test_a_run_resumed_without_its_hook_says_how_to_go_on(foreign, capsys):
    """Its config names the hook still; nothing that it names is loaded to say so."""
    change(foreign, "model", scheme="euler")
    change(foreign, "train", hooks=["my_package:Hook"])
    log_next_commands(foreign)
    assert f"evaluate --workdir={foreign} --trust_plugins" in capsys.readouterr().err


def test_what_a_run_recorded_is_not_imported(foreign, tmp_path, monkeypatch):
    (tmp_path / "harmful.py").write_text("open('pwned', 'w')")
    monkeypatch.syspath_prepend(tmp_path)
    change(foreign, "model", scheme="euler")
    change(foreign, None, plugins={"harmful": "sha256 0"})
    read_config(foreign)


def test_arrays_hold_no_objects(tmp_path):
    """NumPy's pickles would run code."""
    packed = io.BytesIO()
    np.savez(packed, a=np.array([os.getpid], object))
    packed.seek(0)
    with np.load(packed) as arrays, pytest.raises(ValueError, match="allow_pickle"):
        arrays["a"]


@pytest.mark.parametrize("name", [SHELL, "os:getcwd", "os:sep", "json:dumps(obj=1)"])
def test_only_what_says_that_it_is_of_the_kind_is_called(name):
    refused = pytest.raises(InputError, match=r"is not called, because it doesn't say|is a str; ")
    keys = Config().with_values({"optimizer.name": name}).optimizer
    with refused:
        find_scheme(name)
    with refused:
        make_optimizer(keys, {})


def test_json_that_is_nested_too_deeply(foreign):
    (foreign / "config.json").write_text("[" * 100_000)
    with pytest.raises(InputError, match="nested too deeply; restore it"):
        read_config(foreign)
