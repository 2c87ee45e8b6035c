import json

import pytest

from configs import default
from t5x_diffeq.runs.workdir import read_config
from t5x_diffeq.runtime import former_keys
from t5x_diffeq.runtime.config import KEYS, Config
from t5x_diffeq.runtime.config_files import load_config
from t5x_diffeq.runtime.errors import InputError


def write_config(folder, **values):
    """A `config.json` with these values for keys of `train` and `optimizer`."""
    content = Config.of(default.get_config()).as_json()
    for key, value in values.items():
        section, _, name = key.partition("__")
        content[section][name] = value
    (folder / "config.json").write_text(json.dumps(content))


def test_a_run_that_made_no_use_of_a_removed_key_loads(tmp_path):
    write_config(tmp_path, train__jitter=0.0, optimizer__moment_dtype="float32")
    assert read_config(tmp_path) == Config.of(default.get_config())


def test_a_run_that_used_a_removed_key_names_the_last_commit_that_had_it(tmp_path):
    write_config(tmp_path, train__jitter=0.5)
    with pytest.raises(InputError, match=r"train\.jitter was 0\.5.*commit \w{7} "):
        read_config(tmp_path)


def test_a_removed_key_on_the_command_line_says_so():
    with pytest.raises(InputError, match=r"train\.jitter.*was removed; commit \w{7} "):
        load_config("configs/tiny.py", {"train.jitter": 0.5})


def test_no_key_of_today_is_called_removed():
    assert not KEYS.keys() & former_keys._REMOVED.keys()
    for key, values in former_keys._REMOVED_VALUES.items():
        assert all(KEYS[key].values.fault(value) for value in values)
