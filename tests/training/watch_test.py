"""The curves inside the model, against direct references; watching changes nothing else."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import metrics_of, setup_of, small_config, stop_after, training_of
from small_models import random_params
from small_models import small as small_model

from t5x_diffeq.cli.train import train_to_end
from t5x_diffeq.config.config import Config
from t5x_diffeq.model.language_model import in_one_document, nodes
from t5x_diffeq.model.sub_fields import make_block
from t5x_diffeq.training.hooks.watcher import Watcher
from t5x_diffeq.training.step import lower_train_step
from t5x_diffeq.training.watch import _some_rows

pytestmark = pytest.mark.in_turns
BATCH = 8
LAYERS = {"attention.qkv", "attention.output", "attention_norm", "mlp.up", "mlp.down", "mlp_norm"}


def random_batch(setup):
    rng = np.random.default_rng(0)
    shapes = setup.abstract_batch(BATCH)
    tokens = rng.integers(0, 256, shapes["inputs"].shape)
    arrays = {
        "inputs": tokens,
        "targets": np.roll(tokens, -1, 1),
        "mask": rng.random(tokens.shape) < 0.7,
        "segments": np.zeros(tokens.shape),
        "positions": np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape),
    }
    return {
        name: jax.device_put(array.astype(shapes[name].dtype), shapes[name].sharding)
        for name, array in arrays.items()
    }


def watch_a_step(config, depths=None, trains=True):
    """The setup, the curves of a step, the parameters before and after it, and its batch.

    The parameters before it are random. Unless it trains, the step only moves the parameters: its
    compilation takes most of the time, and no curve but the gradient's comes from it.
    """
    config.train.update(watch_every=1, batch_size=BATCH)
    setup = setup_of(config)
    with setup.context():
        step = lower_train_step(setup, BATCH, depths).compile() if trains else shift
        state = setup.init_state()
        start = state.replace(params=move(state.params, 0.05))
        before, batch = jax.device_get(start.params), random_batch(setup)
        with Watcher(training_of(setup, Path())) as watcher:
            watcher.before_step(1, start, batch)
            after, metrics = step(start, batch, setup.schedule)
            watcher.after_step(1, after, metrics)
        curves = jax.device_get(watcher.curves[1])
    rest = jax.device_get((after.params, batch))
    return setup, curves, *jax.tree.map(jnp.asarray, (before, *rest))


def move(params, by):
    """The parameters, moved at random."""
    rng = np.random.default_rng(1)
    return jax.tree.map(
        lambda x: jax.device_put(
            np.asarray(x) + by * rng.normal(size=x.shape).astype(np.float32), x.sharding
        ),
        params,
    )


def shift(state, batch, schedule):
    """Stands for a train step of a model none of whose weights have a gradient."""
    return state.replace(params=move(state.params, 0.01)), {}


def norms(weights):
    """By layer and node, in NumPy."""
    squares = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(weights):
        layer = ".".join(key.key for key in path[:-1])
        flat = np.asarray(leaf, np.float64).reshape(len(leaf), -1)
        squares[layer] = squares.get(layer, 0) + np.square(flat).sum(1)
    return {layer: np.sqrt(square) for layer, square in squares.items()}


def agree(curves, kind, expected, rtol=2e-4):
    found = {name.partition("/")[2]: x for name, x in curves.items() if name.startswith(kind)}
    assert found.keys() == expected.keys()
    for layer, values in expected.items():
        np.testing.assert_allclose(found[layer], values, rtol=rtol, atol=1e-6, err_msg=layer)


def weights_of(model, params):
    return model.apply({"params": params}, method="weights")


def loss_of_weights(setup, params, batch):
    """The mean cross entropy as a function of the weights of the pass, by the plain logits."""
    model = setup.model

    def loss(weights):
        y = model.apply({"params": params}, batch["inputs"], weights, method="hidden")
        logits = model.apply({"params": params}, y, method="logits")[..., :256]
        each = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
        return (each * batch["mask"]).sum() / batch["mask"].sum()

    return loss


def one_device(text):
    config = small_config(text)
    config.mesh.fsdp = 1
    config.model.num_steps = 3
    config.optimizer.warmup_fraction = 0.0
    return config


@pytest.mark.parametrize(
    ("rows", "shards", "expected"), [(1, 1, 1), (2, 2, 2), (3, 1, 3), (8, 1, 4)]
)
def test_a_small_batch_is_watched_whole(rows, shards, expected):
    batch = {"inputs": jnp.arange(rows * 3).reshape(rows, 3)}
    some = _some_rows(batch, shards)["inputs"]
    assert len(some) == expected and {*some[:, 0].tolist()} <= {*batch["inputs"][:, 0].tolist()}


@pytest.fixture
def one(text):
    """The config of a small run on one device."""
    return one_device(text)


@pytest.fixture(scope="module")
def watched(text):
    """A step of it that was watched."""
    return watch_a_step(one_device(text))


@pytest.mark.slow
def test_against_the_definitions(watched):
    setup, curves, before, after, batch = watched
    weights = weights_of(setup.model, before)
    agree(curves, "weights/", norms(weights))
    agree(
        curves,
        "gradient/",
        norms(jax.jit(jax.grad(loss_of_weights(setup, before, batch)))(weights)),
    )
    change = jax.tree.map(np.subtract, weights_of(setup.model, after), weights)
    agree(curves, "update/", norms(change), rtol=2e-3)
    assert {name.rpartition("/")[2] for name in curves if "/" in name} == LAYERS
    rows = batch["inputs"][::2]  # four of eight, evenly
    states = setup.model.apply({"params": before}, rows, weights, method="trajectory")
    np.testing.assert_allclose(curves["state"], rms(states, (1, 2, 3)), rtol=1e-5)
    f, g = sub_fields(setup, weights, states)
    np.testing.assert_allclose(f + g, 3 * np.diff(states, axis=0), atol=1e-4)  # Euler's steps
    np.testing.assert_allclose(curves["f"], rms(f, (1, 2, 3)), rtol=1e-4)
    np.testing.assert_allclose(curves["g"], rms(g, (1, 2, 3)), rtol=1e-4)


def rms(x, axes):
    return np.sqrt(np.square(np.asarray(x, np.float64)).mean(axes))


def sub_fields(setup, weights, states):
    """f and g at the first three states, called as the block's methods."""
    block, places = (
        make_block(setup.model.config),
        in_one_document(jnp.zeros(states.shape[1:3], jnp.int32)),
    )
    pairs = []
    for n in range(3):
        variables = {"params": jax.tree.map(lambda w, n=n: w[n], weights)}
        f = block.apply(variables, states[n], places, method="f")
        pairs.append((f, block.apply(variables, states[n], method="g")))
    return tuple(np.stack(each) for each in zip(*pairs, strict=True))


@pytest.mark.parametrize("changes", [{}, {"init": "paper", "time_embedding": "common"}], ids=str)
def test_the_derivative_is_the_difference_quotient(changes):
    """Of e(t) in float64: float32 sinusoids of 1000 t are too coarse to be differenced."""
    model = small_model(**changes)
    params = random_params(model)
    rates = model.apply({"params": params}, method="derivative")

    def embed(params, t):
        w = 10_000.0 ** (-np.arange(4) / 4)
        t = np.asarray(t, np.float64)[:, None]
        gamma = np.concatenate((t, np.sin(1000 * t * w), np.cos(1000 * t * w)), -1)
        own = {name: np.asarray(x, np.float64) for name, x in params.items()}
        x = gamma @ own["hidden_kernel"] + own["hidden_bias"]
        return x / (1 + np.exp(-x)) @ own["output_kernel"] + own["output_bias"]

    t, h = nodes(model.config).astype(np.float64), 1e-7
    for layer, leaves in params["source"].items():
        if layer == "time_embedding":
            continue
        own = leaves.get("time_embedding") or params["source"]["time_embedding"]
        de = (embed(own, t + h) - embed(own, t - h)) / (2 * h)
        first, second = layer.split(".") if "." in layer else (layer, None)
        made = rates[first][second] if second else rates[first]
        for name, rate in made.items():
            expected = np.tensordot(de, np.asarray(leaves[name], np.float64), 1)
            np.testing.assert_allclose(rate, expected, atol=3e-4 * np.abs(expected).max())


@pytest.mark.slow
def test_layers_and_shared_weights(one):
    one.model.update(weights="per_layer", scheme="lie_trotter", step_size="1")
    _, curves, before, after, _ = watch_a_step(one, trains=False)
    stacked = before["source"]["weights"]
    agree(curves, "weights/", norms(stacked))
    agree(curves, "dW_dt/", norms(jax.tree.map(lambda W: 3 * np.diff(W, axis=0), stacked)))
    change = jax.tree.map(np.subtract, after["source"]["weights"], stacked)
    agree(curves, "update/", norms(change), rtol=2e-3)
    one.model.update(weights="shared", scheme="rk4", step_size="1/N")
    _, curves, *_ = watch_a_step(one, trains=False)
    for name, curve in curves.items():
        assert name.startswith("dW_dt/") == (not curve.any()), name
        assert not name.startswith(("weights/", "update/")) or np.ptp(curve) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        {"mesh": {"data": 2, "fsdp": 2, "tensor": 2}, "train": {"microbatches": 2}},
        {"mesh": {"fsdp": 8}},
    ],
    ids=str,
)
def test_sharded_equals_whole(watched, one, change):
    expected = watched[1]
    for section, values in change.items():
        one[section].update(values)
    setup, curves, *_ = watch_a_step(one)
    assert setup.mesh.size == 8
    assert curves.keys() == expected.keys()
    for name, curve in curves.items():
        # f, g and the state are of one row of each shard, here others.
        if "/" in name:
            np.testing.assert_allclose(curve, expected[name], rtol=2e-3, atol=1e-6, err_msg=name)


@pytest.mark.slow
def test_adapters_frozen_parts_and_depths(one):
    one.model.update(weights="per_layer", adapter_rank=2, adapter_kernels=("up",), num_steps=2)
    one.train.trainable = ("adapters",)
    _, curves, before, after, _ = watch_a_step(one)
    assert {name for name in curves if name.startswith("gradient")} == {"gradient/adapters.mlp.up"}
    factors = [params["adapters"]["mlp.up"] for params in (before, after)]
    b = [{"x": {"y": {"a": f["a"], "b": 8 * f["b"]}}} for f in factors]  # alpha / rank
    np.testing.assert_allclose(curves["weights/adapters.mlp.up"], norms(b[0])["x.y"], rtol=1e-4)
    change = norms(jax.tree.map(np.subtract, b[1], b[0]))["x.y"]
    np.testing.assert_allclose(curves["update/adapters.mlp.up"], change, rtol=2e-3)
    assert not curves["update/mlp.up"].any() and "dW_dt/adapters.mlp.up" not in curves
    one.model.update(weights="time_dependent", adapter_rank=0, adapter_kernels=(), num_steps=3)
    one.train.update(trainable=(), depths=(2, 3), depths_per_step=1)
    _, curves, *_ = watch_a_step(one, (2, 3))
    assert len(curves["gradient/mlp.up"]) == len(curves["weights/mlp.up"]) == 3
    with setup_of(one).context():  # a step on another grid has no gradient at the own grid's nodes
        lowered = lower_train_step(setup_of(one), BATCH, (2,))
    assert all(metric.ndim == 0 for metric in lowered.out_info[1].values())


@pytest.mark.slow
def test_only_a_watched_run_pays(one):
    """Its train step returns the gradient's norms; without it nothing more is compiled."""

    def curves():
        setup = setup_of(one)
        with setup.context():
            metrics = lower_train_step(setup, BATCH).out_info[1]
        return {name for name, metric in metrics.items() if metric.ndim}

    assert not curves()
    with Watcher(training_of(setup_of(one), Path())) as watcher:
        assert not watcher.compiling.is_alive()
    one.train.watch_every = 5
    assert "gradient/mlp.up" in curves()


def read_curves(workdir):
    return [json.loads(line) for line in (workdir / "curves.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def watched_run(finished, tmp_path_factory):
    """The config and workdir of a run that was watched every second step."""
    config = finished[0].copy_and_resolve_references()
    config.train.watch_every = 2
    workdir = tmp_path_factory.mktemp("watched")
    assert train_to_end(Config.of(config), workdir) == 0
    return config, workdir


@pytest.mark.slow
def test_a_watched_run_has_the_same_losses(watched_run, finished):
    _, workdir = watched_run
    assert metrics_of(workdir) == metrics_of(finished[1])  # bit for bit
    assert [line["step"] for line in read_curves(workdir)] == [2, 4, 6]
    events = b"".join(path.read_bytes() for path in (workdir / "events").iterdir())
    assert events.count(b"watch/curves") == 3


@pytest.mark.slow
def test_a_resumed_run_has_the_same_curves(watched_run, tmp_path):
    config, workdir = watched_run
    assert stop_after(3, Config.of(config), tmp_path) == 42
    with (tmp_path / "curves.jsonl").open("a") as file:
        file.write('{"step": 6, "of": "an attempt that was killed"}\n')
    assert train_to_end(Config.of(config), tmp_path) == 0
    assert read_curves(tmp_path) == read_curves(workdir)
