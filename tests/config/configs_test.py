"""Every config and variant makes a model, of the size that it says."""

import importlib
import json

import jax
import pytest
from helpers import ROOT

from configs.default import VARIANTS
from t5x_diffeq import __version__
from t5x_diffeq.checkpoints.workdir import check_config, read_config, save_config
from t5x_diffeq.config.config import Config
from t5x_diffeq.config.config_files import default_config, load_config
from t5x_diffeq.model.config import ModelConfig
from t5x_diffeq.model.config_layers import attention_of, mlp_of
from t5x_diffeq.model.language_model import LanguageModel
from t5x_diffeq.system.chips import CHIPS
from t5x_diffeq.system.errors import InputError
from t5x_diffeq.training import placed_model
from t5x_diffeq.training.partitioning import make_mesh
from t5x_diffeq.training.placed_model import declared_params, place_model
from t5x_diffeq.training.setup import expected_vocab_size

# finetune.py's models are those of other runs: see finetune_test.py.
OTHERS = ("paper", "finetune")
EXPERIMENTS = [p.stem for p in (ROOT / "configs").glob("*.py") if p.stem not in OTHERS]
BILLIONS = {  # parameters, embeddings and the padding of the vocabulary included
    ("gpt_small", "ode"): 0.188,
    ("gpt_small", "baseline"): 0.124,
    ("gpt_small", "compact"): 0.108,
    ("gpt_medium", "baseline"): 0.355,
    ("gpt_large", "baseline"): 0.774,
    ("llama1b", "ode"): 6.6,
    ("llama1b", "compact"): 1.04,
    ("llama1b", "baseline"): 1.21,
    ("llama7b", "ode"): 19.9,
    ("llama7b", "compact"): 5.33,
    ("llama7b", "baseline"): 6.74,
}


# One function sets the variants of all files, so one file shows that each of them makes a model.
CASES = dict.fromkeys(
    [
        *((name, None) for name in EXPERIMENTS if (name, "ode") not in BILLIONS),
        *(("tiny", each) for each in VARIANTS),
        *BILLIONS,
    ]
)


@pytest.mark.parametrize(("name", "variant"), CASES)
def test_makes_a_model(name, variant):
    get_config = importlib.import_module(f"configs.{name}").get_config
    config = get_config(variant) if variant else get_config()
    config = Config.of(config)
    model = ModelConfig.of(config.model, expected_vocab_size(config), config.data.sequence_length)
    model, _ = model.with_attention_for("cpu")
    count = sum(x.size for x in jax.tree.leaves(declared_params(LanguageModel(model))))
    if (name, variant) in BILLIONS:
        assert count / 1e9 == pytest.approx(BILLIONS[name, variant], rel=0.02)


@pytest.mark.parametrize(
    ("platform", "steps", "expected"),
    [("gpu", 12, 12), ("gpu", 32, 32), ("gpu", 33, 17), ("gpu", 80, 27), ("cpu", 12, 1)],
)
def test_loops_are_unrolled_on_gpus(platform, steps, expected):
    config = importlib.import_module("configs.tiny").get_config()
    config.model.update(num_steps=steps, remat="full")
    of_full = ModelConfig.of(Config.of(config).model, 256, 64).for_platform(platform)
    assert of_full.scan_unroll == 1  # in which it takes a fifth of the memory
    config.model.remat = "keep:qkv"
    for unroll, chosen in ((None, expected), (2, 2)):
        config.model.scan_unroll = unroll
        keys = Config.of(config)
        model = ModelConfig.of(keys.model, 256, 64).for_platform(platform)
        assert model.scan_unroll == chosen


def test_layouts_suit_the_platform():
    """Tokens are merged but on TPUs, where the state is carried row by row; fp8 merges always."""
    config = importlib.import_module("configs.tiny").get_config()
    config.model.dtype = "bfloat16"
    for platform, products, merged in (
        ("cpu", "dtype", True),
        ("gpu", "dtype", True),
        ("tpu", "dtype", False),
        ("tpu", "fp8", True),
    ):
        config.model.products = products
        model = ModelConfig.of(Config.of(config).model, 256, 64).for_platform(platform)
        mlp, attention = mlp_of(model), attention_of(model)
        assert mlp.merge_tokens == attention.merge_tokens == merged
        new = jax.__version_info__ >= (0, 12)
        assert model.state_row_major == (platform == "tpu" and new)


H100 = "NVIDIA H100 80GB HBM3"


@pytest.mark.parametrize(
    ("kind", "tensor", "expected"),
    [(H100, 1, 8192), (H100, 2, 16384), ("TPU v5 lite", 1, 2048), ("cpu", 1, 2048)],
)
def test_as_many_logits_exist_at_once_as_fit(kind, tensor, expected, monkeypatch):
    """At most a 64th of the memory, in float32, for a vocabulary of 32,000."""
    config = importlib.import_module("configs.tiny").get_config()
    config.mesh.tensor = tensor
    monkeypatch.setattr(placed_model, "chip", lambda of_this_machine: CHIPS.get(kind))
    for key, chosen in ((None, expected), (500, 500)):
        config.train.loss_chunk = key
        keys = Config.of(config)
        placed = place_model(keys, 32_000, make_mesh(keys.mesh, keys.train.batch_size))
        assert placed.loss_chunk == placed.train_config.loss_chunk == chosen
    if kind == H100:
        assert 4 * expected * 32_000 / tensor < CHIPS[kind].memory_bytes / 64


def test_a_workdir_from_before_a_key_existed_goes_on(tmp_path):
    config = default_config()
    before = Config.of(config).as_json()
    before["tasks"] = {"names": [], "every": 5000}  # a section that there was
    del before["optimizer"]["moments"], before["model"]["state_dtype"]
    (tmp_path / "config.json").write_text(json.dumps(before))
    assert read_config(tmp_path) == Config.of(config)
    assert not check_config(Config.of(config), tmp_path)
    config.optimizer.moments = "bfloat16"
    with pytest.raises(InputError, match=r"optimizer.moments was 'float32', is 'bfloat16'"):
        check_config(Config.of(config), tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c["model"].update(warp=3), r"by t5x_diffeq 9\.1, .* its key model\.warp does"),
        (lambda c: c.update(parts={"a": 1}), r"by t5x_diffeq 9\.1, .* its key parts\.a does not"),
        (
            lambda c: c["model"].update(num_heads="4"),
            r"by t5x_diffeq 9\.1, .* model\.num_heads is '4'; it must be a whole number",
        ),
        (lambda c: c["train"].update(batch_size=None), r"9\.1, .* train\.batch_size is None; it"),
        (lambda c: c.update(model=[1]), r"model is \[1\]; it must be a JSON object"),
        (lambda c: c.pop("mesh"), "is not the config of a run: it lacks mesh; restore it"),
    ],
)
def test_what_is_wrong_in_a_workdirs_config_is_named(tmp_path, change, message):
    save_config(Config.of(default_config()), tmp_path, "run")
    path = tmp_path / "config.json"
    content = json.loads(path.read_text())
    assert content.pop("t5x_diffeq") == __version__
    change(content)
    path.write_text(json.dumps({"t5x_diffeq": "9.1", **content}))
    with pytest.raises(InputError, match=message):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("config['model.num_steps'] = 3", "line 5: .* write config.model.num_steps = 3"),
        ("config.model = dict(num_steps=3)", r"line 5: model is a section; .*update\(\{'num_st"),
        ("sys.exit('usage')", r"own.py ends the process \(SystemExit: usage\); .* take out argpar"),
    ],
)
def test_lines_that_a_config_file_can_not_have(line, message, tmp_path):
    head = (
        "import sys\nfrom configs import tiny\ndef get_config():\n    config = tiny.get_config()\n"
    )
    (tmp_path / "own.py").write_text(f"{head}    {line}\n    return config\n")
    with pytest.raises(InputError, match=message):
        load_config(tmp_path / "own.py")


def test_a_runs_config_is_no_config_file(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InputError, match=r"load\(WORKDIR\)\.config is the config of a run"):
        load_config(tmp_path / "config.json")
