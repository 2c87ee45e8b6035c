"""Every config and variant makes a model, of the size that it says."""

import importlib
import inspect
import json

import jax
import pytest
from conftest import ROOT

from t5x_diffeq.benchmark import vocab_size
from t5x_diffeq.command_line import check_complete
from t5x_diffeq.config_files import default_config
from t5x_diffeq.errors import InputError
from t5x_diffeq.models.config import ModelConfig
from t5x_diffeq.models.language_model import LanguageModel
from t5x_diffeq.training.state import declared_params
from t5x_diffeq.training.workdir import as_json, check_config, read_config

# finetune.py's models are those of other runs: see finetune_test.py.
OTHERS = ("paper", "finetune")
EXPERIMENTS = [p.stem for p in (ROOT / "configs").glob("*.py") if p.stem not in OTHERS]
BILLIONS = {  # parameters, embeddings and the padding of the vocabulary included
    ("gpt_small", "ode"): 0.188,
    ("gpt_small", "baseline"): 0.124,
    ("gpt_medium", "baseline"): 0.355,
    ("gpt_large", "baseline"): 0.774,
    ("llama1b", "ode"): 6.6,
    ("llama1b", "baseline"): 1.21,
    ("llama7b", "ode"): 19.9,
    ("llama7b", "baseline"): 6.74,
}


def variants():
    for name in EXPERIMENTS:
        get_config = importlib.import_module(f"configs.{name}").get_config
        takes_variant = inspect.signature(get_config).parameters
        for variant in ("ode", "baseline", "shared") if takes_variant else (None,):
            yield name, variant


@pytest.mark.parametrize(("name", "variant"), variants())
def test_makes_a_model(name, variant):
    get_config = importlib.import_module(f"configs.{name}").get_config
    config = get_config(variant) if variant else get_config()
    check_complete(config)
    keys = config.model.to_dict()
    model = ModelConfig.of(keys, vocab_size(config), config.data.sequence_length)
    model, _ = model.with_attention_for("cpu")
    count = sum(x.size for x in jax.tree.leaves(declared_params(LanguageModel(model))))
    if (name, variant) in BILLIONS:
        assert count / 1e9 == pytest.approx(BILLIONS[name, variant], rel=0.02)


def test_unknown_variant():
    with pytest.raises(ValueError, match="variant 'odd' is unknown; there are ode"):
        importlib.import_module("configs.gpt_small").get_config("odd")


def test_a_workdir_from_before_a_key_existed_goes_on(tmp_path):
    config = default_config()
    before = as_json(config)
    del before["tasks"], before["optimizer"]["moment_dtype"], before["model"]["state_dtype"]
    (tmp_path / "config.json").write_text(json.dumps(before))
    assert read_config(tmp_path) == as_json(config)
    assert not check_config(config, tmp_path)
    config.optimizer.moment_dtype = "bfloat16"
    with pytest.raises(InputError, match=r"optimizer.moment_dtype was 'float32', is 'bfloat16'"):
        check_config(config, tmp_path)
