import json
import re

import pytest
from absl import flags
from ml_collections.config_flags import config_flags

from configs import default
from t5x_diffeq.runs.workdir import read_config
from t5x_diffeq.runtime import former_keys
from t5x_diffeq.runtime.command_line import parse
from t5x_diffeq.runtime.config import KEYS, Config
from t5x_diffeq.runtime.config_files import load_config
from t5x_diffeq.runtime.errors import InputError
from t5x_diffeq.runtime.keys.key import check_value
from t5x_diffeq.runtime.mistakes import check_keys


def write_config(folder, **values):
    """A `config.json` with these values, each for the key `section__name`."""
    content = Config.of(default.get_config()).as_json()
    for key, value in values.items():
        section, _, name = key.partition("__")
        content[section][name] = value
    (folder / "config.json").write_text(json.dumps(content))


def test_a_run_that_made_no_use_of_a_removed_key_loads(tmp_path):
    write_config(tmp_path, train__jitter=0.0, optimizer__moment_dtype="float32", mesh__expert=1)
    assert read_config(tmp_path) == Config.of(default.get_config())


def test_a_run_that_used_a_removed_key_names_the_last_commit_that_had_it(tmp_path):
    write_config(tmp_path, train__jitter=0.5)
    with pytest.raises(InputError, match=r"train\.jitter=0\.5 was removed; commit \w{7} "):
        read_config(tmp_path, to_train=True)
    assert read_config(tmp_path) == Config()  # to be evaluated, for example


# Values of keys that are still there: one for each that is removed.
REMOVED_VALUES = [
    ("model.block", "t5x_diffeq.blocks.gated_linear_attention:GatedLinearBlock"),
    ("model.block", "t5x_diffeq.blocks.mixture_of_experts:MixtureBlock(num_experts=8)"),
    ("model.remat", "every:2"),
    ("model.scheme", "leapfrog"),
    ("model.scheme", "reversible:midpoint"),
    ("model.time_basis", "chebyshev:6"),
    ("model.time_basis", "splines:4"),
    ("optimizer.moments", "factored"),
    ("train.trackers", ("tensorboard", "trackio")),
]


@pytest.mark.parametrize(("key", "value"), REMOVED_VALUES[:-1])
def test_a_run_that_used_a_removed_value_names_the_last_commit_that_had_it(tmp_path, key, value):
    write_config(tmp_path, **{key.replace(".", "__"): value})
    with pytest.raises(InputError, match=re.escape(f"{key}={value!r} was removed; commit ")):
        read_config(tmp_path, to_train=True)


def test_each_removed_block_has_a_last_commit():
    for (key, value), commit in zip(REMOVED_VALUES, ("14a4da5", "d3df509"), strict=False):
        assert f"commit {commit} " in former_keys.former_value_error(key, value)


def test_a_run_goes_on_without_what_did_not_change_what_it_computes(tmp_path):
    gone = {"mesh__stage": 2, "model__pipeline_microbatches": 4, "optimizer__offload": True}
    write_config(tmp_path, train__trackers=("tensorboard", "trackio"), **gone)
    assert read_config(tmp_path, to_train=True) == Config()
    with pytest.raises(InputError, match=r"train\.trackers.*was removed; commit 14a4da5 "):
        load_config("configs/tiny.py", {"train.trackers": ("trackio",)})
    with pytest.raises(InputError, match=r"mesh\.stage.*was removed; commit d3df509 "):
        load_config("configs/tiny.py", {"mesh.stage": 2})


def test_a_removed_key_on_the_command_line_says_so():
    with pytest.raises(InputError, match=r"train\.jitter.*was removed; commit \w{7} "):
        load_config("configs/tiny.py", {"train.jitter": 0.5})
    with pytest.raises(InputError, match=r"optimizer\.offload.*was removed; commit d3df509 "):
        load_config("configs/tiny.py", {"optimizer.offload": True})


def test_a_run_from_before_a_key_or_value_was_renamed_loads(tmp_path):
    config = Config().with_values(
        {"optimizer.end_lr_fraction": 0.3, "model.time_embedding": "common"}
    )
    content = config.as_json()
    content["optimizer"]["min_lr_ratio"] = content["optimizer"].pop("end_lr_fraction")
    content["model"]["time_embedding"] = "shared"
    (tmp_path / "config.json").write_text(json.dumps(content))
    assert read_config(tmp_path) == config


def test_a_renamed_key_or_value_is_answered_with_the_new_name():
    with pytest.raises(InputError, match=r"'model\.rotary_base' is called 'model\.rope_theta' now"):
        load_config("configs/tiny.py", {"model.rotary_base": 1e6})
    with pytest.raises(InputError, match=r"time_embedding=shared is called common now"):
        load_config("configs/tiny.py", {"model.time_embedding": "shared"})
    with pytest.raises(InputError, match=r"'model\.rotary_base' is called 'model\.rope_theta' now"):
        check_keys(["train", "--config.model.rotary_base=1e6"])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("model.rotary_base = 1e6", r"'model\.rotary_base' is called 'model\.rope_theta' now"),
        ("train.update(jitter=0.1)", r"'train\.jitter' was removed; commit"),
        ("model.time_embedding = 'shared'", r"time_embedding=shared is called common now"),
    ],
)
def test_a_config_file_with_a_former_key(tmp_path, line, message):
    path = tmp_path / "own.py"
    path.write_text(
        "from configs import default\n"
        "def get_config():\n"
        "    config = default.get_config()\n"
        f"    config.{line}\n"
        "    return config\n"
    )
    with pytest.raises(InputError, match=message):
        load_config(str(path))
    own = flags.FlagValues()
    config_flags.DEFINE_config_file("config", None, "", flag_values=own)
    with pytest.raises(InputError, match=message):
        parse(["verb", f"--config={path}"], own)


def test_no_key_of_today_is_called_removed():
    former = former_keys._REMOVED.keys() | former_keys._RENAMED.keys()
    assert not KEYS.keys() & former
    assert set(former_keys._RENAMED.values()) <= KEYS.keys()
    for key, names in former_keys._RENAMED_VALUES.items():
        assert all(KEYS[key].values.fault(old) for old in names)
        assert not any(KEYS[key].values.fault(new) for new in names.values())
    assert former_keys._REMOVED_VALUES.keys() == {key for key, _ in REMOVED_VALUES}
    for key, value in REMOVED_VALUES:
        with pytest.raises(InputError, match=re.escape(f"{key}={value!r} was removed; commit")):
            check_value(key, KEYS[key].values, value)


def test_a_trained_model_loads_unless_it_needs_what_was_removed(tmp_path):
    write_config(tmp_path, model__remat="every:2", optimizer__moments="int4")
    assert read_config(tmp_path) == Config()
    write_config(tmp_path, model__time_basis="chebyshev:6")
    with pytest.raises(InputError, match=r"time_basis='chebyshev:6' was removed"):
        read_config(tmp_path)
