"""Stages: a pipeline over solver steps computes what one device computes, and P stays in place."""

from functools import partial
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from helpers import assert_close, auto_mesh, metrics_of, setup_of, train_keys
from jax.sharding import PartitionSpec
from small_models import LLAMA, random_params, uneven_batch
from small_models import small as small_model

from t5x_diffeq.data.corpus import load_corpus
from t5x_diffeq.inference.split_loss import evaluate_split
from t5x_diffeq.layers.attention_kernels import splash_attention
from t5x_diffeq.ode.stages import can_pipeline, integrate_in_stages
from t5x_diffeq.planner.collectives import collectives
from t5x_diffeq.planner.hlo import Shape
from t5x_diffeq.runs.load import load_run
from t5x_diffeq.runtime.config import Config
from t5x_diffeq.runtime.errors import InputError
from t5x_diffeq.training.partitioning import mesh_context
from t5x_diffeq.training.programs import compile_train_step
from t5x_diffeq.training.step import make_gradient
from t5x_diffeq.verbs import train

RNG = np.random.default_rng(0)
BATCH = uneven_batch(RNG, 16) | {
    # Two documents in each row, so that a microbatch with another's places is noticed.
    "segments": jnp.asarray(np.arange(10) > RNG.integers(1, 9, (16, 1)), jnp.int32),
    "positions": jnp.asarray(RNG.integers(0, 10, (16, 10)), jnp.int32),
}
BATCH_AXES = ("data", "fsdp")
RULES = (
    ("batch", BATCH_AXES),
    ("embed", ("fsdp", "stage")),
    ("vocab", "tensor"),
    ("heads", "tensor"),
    ("mlp", "tensor"),
)
TWO = {"stage": 2, "fsdp": 2, "tensor": 2}
FOUR = {"stage": 4, "fsdp": 2}


def results(mesh, **changes):
    """Logits, loss, and gradient of every parameter."""
    model = small_model(num_steps=4, remat="full", **changes)
    params = random_params(model)
    of_batch = make_gradient(model, lambda part: True, train_keys(loss_chunk=32, z_loss=1e-2))

    @partial(jax.jit, compiler_options={"xla_backend_optimization_level": 1})
    def compute(params, batch):
        found = of_batch(params, batch, jax.random.key(0))
        return model.apply({"params": params}, batch["inputs"]), found.means, found.gradient

    if mesh is None:
        return compute(params, BATCH)
    with mesh_context(auto_mesh(**mesh), RULES):
        return compute(params, BATCH)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("weights", "architecture", "scheme", "mesh"),
    [
        ("time_dependent", "gpt", "euler", TWO),
        ("time_dependent", "llama", "heun", FOUR),
        ("per_layer", "gpt", "heun", TWO),
        ("shared", "llama", "heun", FOUR),
    ],
)
def test_it_computes_what_one_device_does(weights, architecture, scheme, mesh):
    changes = {"weights": weights, "scheme": scheme, **(LLAMA if architecture == "llama" else {})}
    expected, found = results(None, **changes), results(mesh, **changes)
    finite = partial(jax.tree.map, lambda x: np.nan_to_num(x, neginf=0))
    assert_close(finite(found), finite(expected), 1e-5)


def test_each_microbatch_meets_every_step_with_its_places_and_keys():
    """y <- y + W_n (y + place) + noise, written as a loop over microbatches and steps."""
    S, M, N, rows = 2, 4, 6, 16
    y = {"state": jnp.asarray(RNG.normal(size=(rows, 3)), jnp.float32), "cost": jnp.zeros(())}
    W = jnp.asarray(0.3 * RNG.normal(size=(N, 3, 3)), jnp.bfloat16)
    places, key = jnp.arange(rows, dtype=jnp.float32), jax.random.key(1)

    def take_steps(W, y, places, key):
        def step(y, W):
            state = y["state"] + (y["state"] + places[:, None]) @ W.astype(jnp.float32)
            return {"state": state, "cost": y["cost"] + state.mean()}, None

        noisy = y["state"] + jax.random.normal(key, y["state"].shape)
        return jax.lax.scan(step, {**y, "state": noisy}, W)[0]

    with mesh_context(auto_mesh(stage=S, fsdp=2), RULES):
        assert can_pipeline(rows, N, M)
        assert not can_pipeline(rows - 8, N, M + 2)  # rows
        assert not can_pipeline(rows, N - 1, M)  # steps
        assert not can_pipeline(rows, N, M - 1)  # microbatches
        run = partial(integrate_in_stages, take_steps, microbatches=M)
        found = jax.jit(run)(W, y, places, key)

    def of_microbatch(m):
        """Each of two devices has eight rows, and two of them in each microbatch."""
        own = np.array([8 * device + 2 * m + row for device in range(2) for row in range(2)])
        at = {"state": y["state"][own], "cost": jnp.zeros(())}
        for s in range(S):
            own_key = jax.random.fold_in(jax.random.fold_in(key, m), s)
            at = take_steps(W[3 * s : 3 * s + 3], at, places[own], own_key)
        return own, at

    costs = []
    for m in range(M):
        own, expected = of_microbatch(m)
        np.testing.assert_allclose(found["state"][own], expected["state"], rtol=1e-5)
        costs.append(expected["cost"])
    np.testing.assert_allclose(found["cost"], np.mean(costs), rtol=1e-5)


@pytest.mark.slow
def test_layers_may_map_over_their_devices_in_a_stage():
    """Attention by a kernel that each device applies to its own rows and heads."""
    q = jnp.asarray(RNG.normal(size=(4, 128, 2, 8)), jnp.float32)

    def take_steps(W, y, places, key):
        spread = splash_attention(y * W[0], y, y, interpret=True)
        return jax.lax.with_sharding_constraint(y + spread, PartitionSpec("fsdp"))

    def loss(W, microbatches):
        run = partial(integrate_in_stages, take_steps, microbatches=microbatches)
        return jnp.square(run(W, q, {}, None)).sum()

    def expected_loss(W):
        y = q
        for n in range(2):
            y = y + splash_attention(y * W[n], y, y, interpret=True)
        return jnp.square(y).sum()

    W = jnp.asarray([0.5, 2.0])
    expected = jax.jit(jax.value_and_grad(expected_loss))(W)
    with mesh_context(auto_mesh(stage=2, fsdp=2, tensor=2), (*RULES, ("length", None))):
        found = jax.jit(jax.value_and_grad(partial(loss, microbatches=2)))(W)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5), found, expected)


@pytest.mark.slow
def test_weights_cross_between_stages_and_p_does_not(small):
    """One all-to-all of W and one of its gradient; T = 11 is a factor of no other size."""
    small.model.update(architecture="llama", num_steps=4, time_embed_dim=11, embed_dim=32)
    small.mesh.update(TWO)
    setup = setup_of(small)
    with setup.context():
        found = collectives(compile_train_step(setup, 8).as_text())

    def has_t(shape: Shape) -> bool:
        return prod(shape.dims) % 11 == 0

    of_p = [(c.kind, shape) for c in found for shape in c.shapes if has_t(shape)]
    assert {kind for kind, _ in of_p} == {"all-reduce"}
    assert all(prod(shape.dims) == 4 * 11 for _, shape in of_p)  # the sums for e(t)

    P = [
        x.sharding.shard_shape(x.shape)
        for path, x in flatten_dict(setup.abstract_state.params["source"]).items()
        if "time_embedding" not in path and not path[-1].endswith("_base")
    ]
    assert len(P) == 9
    W = sum(4 * prod(shape[1:]) for shape in P)  # of four steps, on a device
    states = 4 * 16 * 32  # of the four rows of a device
    exchanged = sum(c.bytes for c in found if c.kind == "all-to-all")
    assert exchanged == 2 * 4 * (W + states)  # there and back, in float32


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model.num_steps": 3}, "model.num_steps=3 is not divisible by mesh.stage=2"),
        ({"train.depths": (2, 3)}, "an entry of train.depths=3 is not divisible by mesh.stage=2"),
        ({"model.pipeline_microbatches": 3}, "microbatches=3 is not divisible by mesh.stage=2"),
        ({"model.pipeline_microbatches": 4}, "train.batch_size=8 is not divisible by 16: 4 micro"),
        ({"train.microbatches": 2}, "train.batch_size=8 is not divisible by 16: 2 micro"),
        ({"mesh.rules": (("mlp", "stage"),)}, "'mlp' goes to 'stage'; mesh axes are data, fsdp"),
    ],
)
def test_what_stages_cannot_share(small, changes, message):
    small.mesh.update(stage=2, fsdp=4)
    small.update_from_flattened_dict(changes)
    with pytest.raises(InputError, match=message):
        setup_of(small)


@pytest.mark.slow
def test_a_run_in_stages_is_a_run(small, tmp_path):
    """Training, evaluation and samples; then one device goes on from its checkpoint."""
    small.train.update(sample_every=6, eval_batch_size=5, total_steps=4)
    lines = {}
    for name, mesh in (("stages", {"stage": 2, "fsdp": 2}), ("one", {"fsdp": 1})):
        small.mesh.update({"stage": 1, **mesh})
        assert train.train(Config.of(small), tmp_path / name) == 0
        lines[name] = metrics_of(tmp_path / name)
    for found, expected in zip(lines["stages"], lines["one"], strict=True):
        assert found.keys() == expected.keys()
        for key in found:
            np.testing.assert_allclose(found[key], expected[key], rtol=1e-4, err_msg=key)
    loaded = load_run(tmp_path / "stages", 256, batch_size=4)
    assert loaded.placed.mesh.shape["stage"] == 1
    evaluated = evaluate_split(loaded, load_corpus(tmp_path / "stages"), batch_size=4)
    last = lines["stages"][-1]["eval/loss"]
    np.testing.assert_allclose(evaluated["loss"], last, rtol=1e-4)
    small.train.total_steps = 6
    assert train.train(Config.of(small), tmp_path / "stages") == 0
    assert metrics_of(tmp_path / "stages")[-1]["step"] == 6
