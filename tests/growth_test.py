"""Late growth: the fine model begins with the coarse model's weights, and then learns to differ."""

import re
import shutil
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax.traverse_util import flatten_dict
from helpers import auto_mesh, metrics_of, setup_of
from small_models import TOKENS, random_params
from small_models import small as small_model

from t5x_diffeq.models.language_model import LanguageModel
from t5x_diffeq.runs.workdir import check_config, save_config
from t5x_diffeq.runtime.config import Config
from t5x_diffeq.runtime.errors import InputError
from t5x_diffeq.training.depths import check_depths, growth_step
from t5x_diffeq.training.growth import coarse_step_of, copy_weights, make_grow, waiting_leaves
from t5x_diffeq.training.partitioning import mesh_context
from t5x_diffeq.training.state import declared_params
from t5x_diffeq.training.step import compile_train_step
from t5x_diffeq.verbs.train import train

GROWING = {"train.depths": (1,), "train.depths_until": 0.5, "train.growth": "copy"}


def weights_of(model, params):
    return nn.apply(LanguageModel.weights, model)({"params": params})


FEW = {"time_basis": "table:6", "time_embed_dim": 4}  # functions of time


@pytest.mark.slow
@pytest.mark.parametrize(
    ("coarse_steps", "keys", "moves_table"),
    [
        (1, {}, ()),
        (2, {"architecture": "llama", "time_embedding": "shared"}, ()),
        (4, {"scheme": "lie_trotter"}, ()),  # which doesn't divide 6
        (4, FEW, ("attention", "mlp")),
        (2, {**FEW, "time_embedding": "shared", "scheme": "strang"}, ("",)),
        (1, {**FEW, "time_embed_dim": 8, "attention_time_embed_dim": 2}, ("attention",)),
    ],
    ids=str,
)
def test_each_step_has_the_weights_of_its_coarse_step(coarse_steps, keys, moves_table):
    model = small_model(num_steps=6, **{"time_embed_dim": 8, **keys})
    params = random_params(model)
    grown = copy_weights(model, coarse_steps, params)
    coarse = weights_of(model.at_depth(coarse_steps), params)
    of_step = coarse_step_of(6, coarse_steps)
    expected = {1: [0] * 6, 2: [0, 0, 0, 1, 1, 1], 4: [0, 0, 1, 2, 2, 3]}
    assert of_step.tolist() == expected[coarse_steps]
    for path, W in flatten_dict(weights_of(model, grown)).items():
        there = flatten_dict(coarse)[path][of_step]
        np.testing.assert_allclose(W, there, atol=2e-5 * np.abs(there).max(), err_msg=str(path))
    before, after = flatten_dict(params), flatten_dict(grown)
    declared = flatten_dict(declared_params(model), is_leaf=lambda _, x: hasattr(x, "role"))
    changed = {path for path in before if not np.array_equal(before[path], after[path])}
    has_e = {p: x for p, x in declared.items() if "time_embed" in x.names}
    of_table = {p for p in has_e if p[1].startswith(moves_table)}
    assert changed == {
        p for p, x in has_e.items() if (p in of_table) == (x.role == "time_embedding")
    }


def test_the_change_is_the_least():
    """Another P with the same weights at the nodes is farther from the one before."""
    model = small_model(num_steps=3, time_embed_dim=5)
    params = random_params(model)
    P = params["source"]["mlp.up"]["kernel"]
    change = copy_weights(model, 1, params)["source"]["mlp.up"]["kernel"] - P
    embeddings = nn.apply(LanguageModel.weights_and_embeddings, model)(
        {"params": params}, jnp.asarray([1 / 3, 2 / 3, 1.0])
    )[1]
    E = np.asarray(embeddings["mlp.up"])
    unseen = np.eye(5) - np.linalg.pinv(E) @ E  # directions that no node of the grid reads
    assert np.abs(unseen @ np.asarray(change).reshape(5, -1)).max() < 1e-4 * np.abs(change).max()


@pytest.mark.slow
def test_sharded_as_on_one_device():
    model = small_model(num_steps=4, time_embed_dim=6)
    params = random_params(model)
    expected = copy_weights(model, 2, params)
    rules = (("embed", "fsdp"), ("vocab", "tensor"), ("mlp", "tensor"), ("heads", "tensor"))
    with mesh_context(auto_mesh(fsdp=4, tensor=2), rules):
        found = jax.jit(partial(copy_weights, model, 2))(params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), found, expected)


@pytest.fixture
def growing(small):
    small.update_from_flattened_dict({**GROWING, "mesh.fsdp": 1})
    small.model.num_steps = 3
    small.train.update(total_steps=6, checkpoint_every=3, eval_every=3, log_every=1)
    return small


def batch_of(setup):
    tokens = np.random.default_rng(0).integers(0, 200, setup.abstract_batch(8)["inputs"].shape)
    values = {"inputs": tokens, "targets": tokens, "mask": np.ones(tokens.shape)}
    values |= {"segments": np.ones(tokens.shape), "positions": np.indices(tokens.shape)[1]}
    shapes = setup.abstract_batch(len(tokens))
    return {name: jnp.asarray(values[name], x.dtype) for name, x in shapes.items()}


@pytest.mark.slow
def test_what_waits_for_growth(growing):
    growing.train.ema_decay = 0.9
    setup = setup_of(growing)
    with setup.context():
        state = setup.init_state()
        params, opt_state = jax.device_get((state.params, state.opt_state))
        coarse, _ = compile_train_step(setup, 8, (1,))(state, batch_of(setup))
        waiting = waiting_leaves(declared_params(setup.model))
        after = flatten_dict(jax.device_get(coarse.params))
        same = {p for p, x in flatten_dict(params).items() if np.array_equal(x, after[p])}
        assert waiting == {p for p in same if p[0] == "source"}
        moments = optax.tree.get(jax.device_get(coarse.opt_state), "mu")
        assert waiting == {p for p, x in flatten_dict(moments).items() if not x.any()}
        assert optax.tree.get(opt_state, "mu").keys() == moments.keys()
        of_schedule = [int(x.count) for x in states_of_schedule(coarse.opt_state)]
        loss = float(make_loss(setup.at_depth(1), coarse.params))
        grown = make_grow(setup)(coarse)
        assert not any(x.any() for x in jax.tree.leaves(optax.tree.get(grown.opt_state, "mu")))
        assert [int(x.count) for x in states_of_schedule(grown.opt_state)] == of_schedule == [1]
        assert abs(float(make_loss(setup, grown.params)) - loss) < 0.05 * loss
        fine, _ = compile_train_step(setup, 8, (3,))(grown, batch_of(setup))
        W = weights_of(setup.model, fine.params)["mlp"]["up"]["kernel"]
    assert np.abs(W[0] - W[1]).max() > 1e-4  # they have begun to differ


def make_loss(setup, params):
    logits = setup.model.apply({"params": params}, TOKENS)
    return -jax.nn.log_softmax(logits)[..., 0].mean()


def states_of_schedule(opt_state):
    def is_one(node):
        return isinstance(node, optax.ScaleByScheduleState)

    return [x for x in jax.tree.leaves(opt_state, is_leaf=is_one) if is_one(x)]


@pytest.mark.slow
@pytest.mark.parametrize("stop", [3, 4])
def test_a_run_resumed_at_its_growth_equals_an_undisturbed_one(growing, tmp_path, stop):
    assert growth_step(Config.of(growing)) == 4
    growing.train.milestones = (4,)
    assert train(Config.of(growing), tmp_path / "whole") == 0
    whole = metrics_of(tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "resumed")
    for later in (4, 6)[stop - 3 :]:
        shutil.rmtree(tmp_path / "resumed" / "checkpoints" / str(later))
    assert train(Config.of(growing), tmp_path / "resumed") == 0
    losses = [
        [(line["step"], line[key]) for line in lines if key in line]
        for lines in (whole, metrics_of(tmp_path / "resumed"))
        for key in ("train/loss", "eval/loss")
    ]
    assert losses[:2] == losses[2:]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"train.depths": ()}, r"train.depths=\(\); give one number below model.num_steps=3"),
        ({"train.depths": (1, 2)}, "give one number below"),
        ({"train.depths": (3,)}, "give one number below model.num_steps=3"),
        ({"train.depths_until": 1.0}, "train.depths_until=1.0; give the fraction"),
        ({"model.weights": "shared"}, "model.weights=shared; take time_dependent"),
        ({"train.trainable": ("embeddings",)}, "name source among them"),
        ({"optimizer.name": "muon"}, "optimizer.name=muon; take adam"),
        ({"model.scheme": "heun"}, "model.scheme=heun, which reads W several times"),
        ({"model.time_embed_dim": 2}, "model.time_embed_dim=2; raise it to at least"),
        ({"model.attention_time_embed_dim": 2}, "model.attention_time_embed_dim=2; raise it"),
        (
            {"model.time_embed_dim": 2, "model.time_basis": "table:4"},
            "model.time_embed_dim=2; raise .* or set model.time_basis=table:3",
        ),
    ],
    ids=str,
)
def test_what_can_not_grow(growing, keys, message):
    check_depths(Config.of(growing))
    growing.update_from_flattened_dict(keys)
    with pytest.raises(InputError, match=message):
        check_depths(Config.of(growing))


def test_a_longer_run_has_to_grow_where_it_did(growing, tmp_path):
    config = Config.of(growing)  # of 6 steps, which grows at the fourth
    save_config(config, tmp_path)
    longer = config.with_values({"train.total_steps": 1000})
    with pytest.raises(InputError, match=r"from step 4 to 501; add train.depths_until=") as error:
        check_config(longer, tmp_path)
    kept = float(re.search(r"depths_until=([\d.]+)", str(error.value))[1])
    assert not check_config(longer.with_values({"train.depths_until": kept}), tmp_path)
    elsewhere = config.with_values({"train.depths_until": 0.9})
    with pytest.raises(InputError, match=r"train.depths_until was 0.5, is 0.9"):
        check_config(elsewhere, tmp_path)
