"""Tuning on another grid: the same function at first, only what should train does, small files."""

import json
import shutil
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fault_checkpoints import truncate
from flax.traverse_util import flatten_dict
from helpers import assert_close, small_config, train_config
from small_models import random_params, small

from configs import finetune as finetune_config
from t5x_diffeq.checkpoints.workdir import read_config
from t5x_diffeq.cli import finetune as verb
from t5x_diffeq.config.config import flatten
from t5x_diffeq.model.adapters import merge
from t5x_diffeq.model.language_model import LanguageModel
from t5x_diffeq.model.layers.linear import ADAPTERS
from t5x_diffeq.system.errors import InputError
from t5x_diffeq.system.files import read_json_object
from t5x_diffeq.training.load import PretrainedRun, discretise, init_from_pretrained, load_run
from t5x_diffeq.training.setup import make_setup
from t5x_diffeq.training.step import make_gradient
from t5x_diffeq.training.tracking.jsonl import read_metrics

TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 50, (2, 10)), jnp.int32)
ADAPTED = {"weights": "per_layer", "adapter_rank": 3}


def logits(model, params):
    return jax.jit(model.apply)({"params": params}, TOKENS)


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["time_dependent", "shared"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("num_steps", [3, 5])
def test_discretised_weights_are_the_same_bit_for_bit(weights, dtype, num_steps):
    model = small(weights=weights, dtype=dtype)
    params = random_params(model)
    on_grid = LanguageModel(replace(model.config, num_steps=num_steps))
    layers = LanguageModel(replace(on_grid.config, weights="per_layer"))
    taken = {**params, "source": {"weights": discretise(on_grid.config, params)}}
    read = [
        jax.jit(lambda p, m=m: m.apply({"params": p}, method="weights"))(p)
        for m, p in ((on_grid, params), (layers, taken))
    ]
    jax.tree.map(np.testing.assert_array_equal, *read)
    np.testing.assert_allclose(logits(layers, taken), logits(on_grid, params), atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"architecture": "llama", "num_kv_heads": 2}], ids=str)
def test_merged_adapters_equal_the_branch(changes):
    model = small(**ADAPTED, **changes)
    params = random_params(model)
    plain = LanguageModel(replace(model.config, adapter_rank=0))
    weights = model.apply({"params": params}, method="merged_weights")
    assert ADAPTERS not in weights
    base = {name: part for name, part in params.items() if name != "adapters"}
    merged = logits(plain, {**base, "source": {"weights": weights}})
    np.testing.assert_allclose(logits(model, params), merged, atol=1e-5)
    apart = np.asarray(merged)[..., :50] - np.asarray(logits(plain, base))[..., :50]
    assert np.abs(apart).max() > 1e-3


def test_adapters_stand_beside_the_kernels_that_are_named():
    model = small(**ADAPTED, adapter_kernels=("qkv", "down"))
    weights = jax.eval_shape(
        lambda: model.apply({"params": random_params(model)}, method="weights")
    )
    assert {path[:-1] for path in flatten_dict(weights[ADAPTERS])} == {
        ("attention", "qkv"),
        ("mlp", "down"),
    }
    with pytest.raises(InputError, match="names 'query'; this block has down, output, qkv, up"):
        jax.eval_shape(small(**ADAPTED, adapter_kernels=("query",)).init, jax.random.key(0), TOKENS)
    with pytest.raises(InputError, match="need per_layer weights"):
        small(adapter_rank=3)
    assert merge({"mlp": {}}) == {}


@pytest.mark.slow
def test_only_what_trains_has_a_gradient():
    """And of the frozen kernels nothing is computed: no array of their size, but themselves."""
    model = small(**ADAPTED, mlp_dim=48, num_steps=3)
    params = random_params(model)
    batch = {"inputs": TOKENS, "targets": TOKENS, "mask": jnp.ones(TOKENS.shape)}

    def of_batch(trains):
        made = make_gradient(model, trains, train_config(loss_chunk=32))
        return jax.jit(made)

    whole, _, loss, *_ = of_batch(lambda part: True)(params, batch, jax.random.key(0))
    some = of_batch(lambda part: part in ("adapters", "token_embedding"))
    found, norm, same_loss, *_ = some(params, batch, jax.random.key(0))
    assert found.keys() == {"adapters", "token_embedding"}
    assert same_loss["loss"] == loss["loss"]
    assert_close(found, {name: whole[name] for name in found}, 1e-4)
    squares = sum(float(jnp.square(leaf).sum()) for leaf in jax.tree.leaves(found))
    np.testing.assert_allclose(norm, np.sqrt(squares), rtol=1e-5)
    costs = [
        f.lower(params, batch, jax.random.key(0)).compile().cost_analysis()["flops"]
        for f in (of_batch(lambda part: True), some)
    ]
    assert costs[1] < 0.85 * costs[0]


# ---------------------------------------------------------------- the verb


@pytest.fixture
def base(finished):
    """The workdir of a run to start from."""
    return finished[1]


def tuning_config(method, base, text, **model):
    """A config of `configs/finetune.py` for the small run."""
    config, like = finetune_config.get_config(method), small_config(text)
    config.init_from = str(base)
    config.data.update(source="text_files", path=str(text))
    config.train.update(
        {k: like.train[k] for k in ("total_steps", "batch_size", "eval_batch_size")}
    )
    config.train.update(log_every=1, eval_every=3, checkpoint_every=3)
    config.mesh.fsdp = 1
    config.model.update(model)
    return config


def evaluations(workdir):
    return [line["eval/loss"] for line in read_metrics(workdir) if "eval/loss" in line]


@pytest.mark.slow
@pytest.mark.in_turns("trainings")
def test_lora_from_its_beginning_to_its_end(base, text, tmp_path, capsys):
    config = tuning_config("lora", base, text, num_steps=3)
    assert verb.finetune(flatten(config), tmp_path / "lora") == 0
    said = capsys.readouterr().err
    assert "trained" in said and "frozen" in said
    before = load_run(base, 256, batch_size=1).at_depth(3)
    after = load_run(tmp_path / "lora", 256, batch_size=1)
    weights = before.placed.model.apply({"params": before.params}, method="weights")
    jax.tree.map(np.testing.assert_array_equal, after.params["source"]["weights"], weights)
    np.testing.assert_array_equal(
        after.params["final_norm"]["scale"], before.params["final_norm"]["scale"]
    )
    assert np.abs(after.params["adapters"]["mlp.up"]["b"]).max() > 0
    with pytest.raises(InputError, match=r"num_steps=2 .* reads weights at other times"):
        after.at_depth(2)
    assert verb.finetune(flatten(config), tmp_path / "lora") == 0
    assert "already finished" in capsys.readouterr().err

    other = tuning_config("full", base, text, num_steps=3)
    assert verb.finetune(flatten(other), tmp_path / "full") == 0
    # All begin as the same function, and learn.
    curves = [evaluations(tmp_path / name) for name in ("lora", "full")]
    assert curves[0][0] == pytest.approx(curves[1][0], abs=1e-5)
    assert all(curve[-1] < curve[0] for curve in curves)


@pytest.mark.slow
def test_the_hypernetwork_goes_on_at_another_number_of_steps(base, text, tmp_path):
    assert (
        verb.finetune(flatten(tuning_config("hypernetwork", base, text, num_steps=4)), tmp_path)
        == 0
    )
    tuned = load_run(tmp_path, 256, batch_size=1)
    assert tuned.placed.model.config.weights == "time_dependent"
    assert tuned.placed.model.config.num_steps == 4
    with pytest.raises(InputError, match="which can't be converted to these"):
        asked = tuned.placed.model.config
        full = replace(asked, weights="shared")
        PretrainedRun(base, 256).check(full)


@pytest.mark.slow
def test_what_is_the_runs_to_say(base, text, tmp_path):
    def check_refused(match, **model):
        with pytest.raises(InputError, match=match):
            verb.finetune(flatten(tuning_config("lora", base, text, **model)), tmp_path / "new")
        assert not (tmp_path / "new" / "config.json").exists()

    check_refused(
        r"model.embed_dim=64 can't be set.* it is 16.*=configs/finetune.py:lora", embed_dim=64
    )
    check_refused(r"model\.num_steps is 0; it must be at least 1", num_steps=0)
    check_refused(r"model\.scheme is 'eular'; it can be euler", scheme="eular")
    config = tuning_config("lora", base, text)
    config.init_from = None
    with pytest.raises(
        InputError, match=r"init_from is not set; finetune needs --config=configs/fin"
    ):
        verb.finetune(flatten(config), tmp_path / "new")
    config.init_from = str(tmp_path / "nothing")
    with pytest.raises(InputError, match=r"holds no run: there is no such folder"):
        verb.finetune(flatten(config), tmp_path / "new")
    config.init_from, config.init_step = str(base), 77
    with pytest.raises(InputError, match=r"checkpoint 77 of .* does not exist; there are 2, 4, 6"):
        verb.finetune(flatten(config), tmp_path / "new")
    assert not (tmp_path / "new").exists()
    config.init_step, config.train.trainable = None, ("adapters", "hands")
    with pytest.raises(InputError, match=r"train\.trainable is .*'hands'.*it can be source, ad"):
        verb.finetune(flatten(config), tmp_path / "new")


@pytest.mark.slow
def test_a_refused_start_leaves_the_workdir_to_another(base, text, tmp_path):
    """A damaged checkpoint is found after the data is prepared; then another one is named."""
    damaged = shutil.copytree(base, tmp_path / "damaged")
    truncate(next((damaged / "checkpoints" / "6").rglob("manifest.ocdbt")))
    config = tuning_config("lora", damaged, text)
    with pytest.raises(InputError, match=r"checkpoint 6 of .* can't be read: .* of 2, 4$"):
        verb.finetune(flatten(config), tmp_path / "new")
    config.init_step = 4
    config.train.total_steps = 1
    assert verb.finetune(flatten(config), tmp_path / "new") == 0


def test_a_run_can_be_used_where_its_kernel_of_attention_can_not(finished, tmp_path):
    workdir = shutil.copytree(finished[1], tmp_path / "run")
    content = read_json_object(workdir / "config.json")
    content["model"]["attention"] = "splash:512"
    (workdir / "config.json").write_text(json.dumps(content))
    assert load_run(workdir, 256, batch_size=1).placed.model.config.attention == "xla"
    given = flatten(finetune_config.get_config("lora"))
    assert verb.complete_config(given, read_config(workdir)).model.attention == "auto"


@pytest.mark.slow
def test_a_state_begun_on_a_mesh_is_sharded(base, text):
    config = verb.complete_config(
        flatten(tuning_config("lora", base, text, num_steps=3)), read_config(base)
    )
    setup = make_setup(config.with_values({"mesh.fsdp": 8, "train.ema_decay": 0.9}), 256)
    with setup.context():
        state, step = init_from_pretrained(setup, PretrainedRun(base, 256))
        averages = setup.complete(state).averages
    assert step == 6
    for name, average in averages.items():  # they begin at the run's parameters
        jax.tree.map(np.testing.assert_array_equal, average, state.params[name])
    kernel = state.params["source"]["weights"]["mlp"]["up"]["kernel"]
    assert len({str(shard.index) for shard in kernel.addressable_shards}) == 8
