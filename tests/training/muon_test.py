"""Muon's directions, as matrices, as functions of time, on a mesh, and in training."""

from collections import Counter
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict
from helpers import assert_learns_and_resumes, auto_mesh, setup_of, small_config
from jax.sharding import PartitionSpec
from optax.contrib import _muon as optax_muon

from t5x_diffeq.model.layers.parameter import Parameter, is_parameter
from t5x_diffeq.planner.hlo import read_program
from t5x_diffeq.planner.trip_count import executions
from t5x_diffeq.system.errors import InputError
from t5x_diffeq.training.optimizers import muon
from t5x_diffeq.training.optimizers.muon import (
    kernels_of_block,
    map_whole_matrices,
    newton_schulz,
)
from t5x_diffeq.training.placed_model import declared_params
from t5x_diffeq.training.step import lower_train_step

KINDS = {
    "ode": {},
    "llama": {"architecture": "llama", "num_kv_heads": 1},
    "per_layer": {"weights": "per_layer"},
    "shared": {"weights": "shared"},
}


def rms(x):
    return np.sqrt(np.square(x).mean())


def iterate(X):
    """The Newton-Schulz iterations of one matrix, in NumPy."""
    X = np.asarray(X, np.float64) / (np.linalg.norm(X) + 1e-12)
    for _ in range(5):
        A = X @ X.T
        X = 3.4445 * X + (-4.7750 * A + 2.0315 * A @ A) @ X
    return X


# ---------------------------------------------------------------------------- one matrix


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(24, 10), (10, 24), (16, 16)])
def test_it_is_the_iteration_of_optax(shape):
    X = jnp.asarray(np.random.default_rng(0).normal(size=(3, *shape)), jnp.float32)
    found = newton_schulz(X)
    for x, same in zip(X, found, strict=True):
        coefficients = jnp.array((3.4445, -4.7750, 2.0315))
        expected = optax_muon.orthogonalize_via_newton_schulz(x, coefficients, 5, eps=1e-12)
        np.testing.assert_allclose(same, expected, atol=1e-5)
    values = np.linalg.svd(found, compute_uv=False)
    assert values.min() > 0.65 and values.max() < 1.25
    assert not newton_schulz(jnp.zeros((1, 4, 6))).any()


# ---------------------------------------------------------------------------- functions of time


@cache
def setup_with(kind, **mesh):
    config = small_config("unused")
    config.model.update(num_steps=3, head_dim=6, **KINDS[kind])
    config.optimizer.name = "muon"
    config.mesh.update(mesh or {"fsdp": 1})
    return setup_of(config)


def random_like(tree, seed):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), jnp.float32), tree)


def embeddings_of(setup, nodes=3):
    """Random e(t) of every generated layer; none unless weights depend on time."""
    layers = setup.abstract_state.params["source"]
    if "weights" in layers:
        return {}
    rng = np.random.default_rng(2)
    return {name: jnp.asarray(rng.normal(size=(nodes, 4)), jnp.float32) for name in layers}


def directions(setup, gradient, embeddings):
    """Muon's directions of the first step, by path, and the kernels."""
    declared = declared_params(setup.model)
    kernels = kernels_of_block(declared)
    paths = {path for kernel in kernels for path in (kernel.path, kernel.offset)}
    ours = unflatten_dict({p: x for p, x in flatten_dict(gradient).items() if p in paths})
    transform = muon.scale_by_muon(kernels, 0.9)
    update = jax.jit(lambda g, e: transform.update(g, transform.init(g), embeddings=e)[0])
    found = update(ours, embeddings)
    return {path: np.asarray(x) for path, x in flatten_dict(found).items()}, kernels


@pytest.mark.parametrize("nodes", [3, 8], ids=["independent", "more nodes than T + 1"])
def test_the_step_of_theta_is_the_least_squares_solution(nodes):
    """Against dense pseudo-inverses, matrix by matrix, for GPT's fused kernel and its MLP."""
    setup = setup_with("ode")
    gradient = random_like(setup.abstract_state.params, 1)
    embeddings = embeddings_of(setup, nodes)
    found, kernels = directions(setup, gradient, embeddings)
    gradient = flatten_dict(gradient)
    assert {kernel.path[1] for kernel in kernels} == {
        "attention.qkv",
        "attention.output",
        "mlp.up",
        "mlp.down",
    }
    for kernel in kernels:
        e = np.asarray(embeddings[kernel.path[1]], np.float64)
        scale = np.append(np.full(4, 1 / rms(e)), 1.0)
        Phi = np.append(e, np.ones((nodes, 1)), 1)
        inverse = scale[:, None] * np.linalg.pinv(Phi * scale, rcond=1e-3**0.5)
        M = np.append(gradient[kernel.path], gradient[kernel.offset][None], 0)
        F = np.tensordot(inverse.T, M, 1)
        R = np.zeros_like(F)
        for n in range(nodes):
            if kernel.path[1] == "attention.qkv":  # three maps of D inputs
                for part in range(3):
                    X = F[n, :, part].reshape(16, -1)
                    R[n, :, part] = 0.2 * max(X.shape) ** 0.5 * iterate(X).reshape(16, 2, 6)
            else:
                X = F[n].reshape(-1, F.shape[-1])
                R[n] = 0.2 * max(X.shape) ** 0.5 * iterate(X).reshape(F[n].shape)
        moved = np.tensordot(Phi @ inverse, R, 1)
        expected = np.tensordot(inverse, R, 1) * np.linalg.norm(R) / np.linalg.norm(moved)
        np.testing.assert_allclose(found[kernel.path], expected[:-1], atol=2e-4)
        np.testing.assert_allclose(found[kernel.offset], expected[-1], atol=2e-4)
        step = np.append(found[kernel.path], found[kernel.offset][None], 0)
        assert rms(np.tensordot(Phi, step, 1)) == pytest.approx(rms(R), rel=1e-3)
        assert rms(R) == pytest.approx(0.2, rel=0.15)
        assert (step * M).sum() > 0
        if nodes == 3:  # then W(t) moves by Muon's direction itself
            np.testing.assert_allclose(np.tensordot(Phi, step, 1), R, atol=2e-4)


# ---------------------------------------------------------------------------- all matrices


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_kernel_of_the_block_moves_equally_far(kind):
    """Whatever holds its weights; for W(t), it is W that moves so far."""
    setup = setup_with(kind)
    embeddings = embeddings_of(setup)
    found, kernels = directions(setup, random_like(setup.abstract_state.params, 1), embeddings)
    declared = flatten_dict(
        declared_params(setup.model)["source"], is_leaf=lambda _, x: is_parameter(x)
    )
    assert {path[1:] for path in found} == {p for p, x in declared.items() if x.role == "kernel"}
    for kernel in kernels:
        step = found[kernel.path]
        if kernel.offset:
            step = np.tensordot(embeddings[kernel.path[1]], step, 1) + found[kernel.offset][None]
        assert rms(step) == pytest.approx(0.2, rel=0.2), kernel.path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "depths", "expected"),
    [
        ("ode", None, {(16, 12): 9, (12, 16): 3, (16, 32): 3, (32, 16): 3}),
        ("ode", (2, 4), {(16, 12): 12, (12, 16): 4, (16, 32): 4, (32, 16): 4}),
        ("per_layer", None, {(16, 12): 9, (12, 16): 3, (16, 32): 3, (32, 16): 3}),
        ("shared", None, {(16, 12): 3, (12, 16): 1, (16, 32): 1, (32, 16): 1}),
    ],
)
def test_a_step_orthogonalises_one_matrix_per_node(kind, depths, expected, monkeypatch):
    """N of them, not T + 1 (here 5); and nodes that several depths share only once."""
    counted = Counter()

    def count(X):
        counted[X.shape[1:]] += len(X)
        return X

    monkeypatch.setattr(muon, "newton_schulz", count)
    setup = setup_with(kind)
    with setup.context():
        lower_train_step(setup, 8, depths)
    assert counted == expected


def test_a_kernel_whose_inputs_are_unknown_is_refused():
    box = Parameter(jnp.zeros((3, 8, 4)), (None, "embed", "mlp"), role="kernel", fan_in=8)
    with pytest.raises(
        InputError, match=r"source/a/kernel, a kernel of shape \(3, 8, 4\).*fan_in=8"
    ):
        kernels_of_block({"source": {"a": {"kernel": box}}})
    named = box.replace(names=("maps", "embed", "mlp"))
    assert kernels_of_block({"source": {"a": {"kernel": named}}})[0].num_inputs == 1


def test_all_other_parameters_get_adam():
    """The head, embeddings and LoRA's factors too; frozen kernels have no momentum."""
    setup = setup_with("llama", data=2, fsdp=4)
    state = setup.abstract_state.opt_state[1].inner_states
    of_muon = flatten_dict(state["muon"].inner_state.momentum)
    sizes = {path: getattr(x, "shape", None) for path, x in of_muon.items()}
    kernels = {path for path, shape in sizes.items() if shape}
    assert ("source", "mlp.up", "kernel") in kernels and ("head",) not in kernels
    assert all(path[0] == "source" and "time_embedding" not in path for path in kernels)
    for path, x in of_muon.items():
        if path in kernels:
            param = flatten_dict(setup.abstract_state.params)[path]
            assert x.shape == param.shape
            assert x.sharding.is_equivalent_to(param.sharding, x.ndim)
    assert not hasattr(state["adam"].inner_state.mu["source"]["mlp.up"]["kernel"], "shape")
    config = small_config("unused")
    config.model.update(weights="per_layer", adapter_rank=2)
    config.train.trainable = ("adapters",)
    config.optimizer.name = "muon"
    tuned = setup_of(config).abstract_state.opt_state[1].inner_states
    assert not jax.tree.leaves(tuned["muon"].inner_state.momentum)
    assert jax.tree.leaves(tuned["adam"].inner_state.mu)


@pytest.mark.parametrize(("factor", "moves"), [(None, False), (2.0, True)])
def test_time_embeddings_are_frozen_unless_they_are_named(factor, moves):
    config = small_config("unused")
    config.optimizer.name = "muon"
    if factor is not None:
        config.optimizer.role_multipliers = (("time_embedding", factor),)
    _, found = updates_of(setup_of(config))
    steps = flatten_dict(found["source"])
    of_time = {path: step for path, step in steps.items() if "time_embedding" in path}
    assert of_time and all(bool(jnp.any(step != 0)) == moves for step in of_time.values())
    assert all(bool(jnp.any(step != 0)) for path, step in steps.items() if path not in of_time)


# ---------------------------------------------------------------------------- on a mesh


def updates_of(setup):
    """The compiled update of the optimizer, and what it returns for a random gradient."""

    def update(gradient, embeddings, params):
        state = setup.optimizer.init(params)
        extra = {"norm": jnp.ones(()), "embeddings": embeddings, "schedule": setup.schedule}
        return setup.optimizer.update(gradient, state, params, **extra)[0]

    shapes = setup.abstract_state.params
    shardings = jax.tree.map(lambda x: x.sharding, shapes)
    place = lambda tree: jax.tree.map(jax.device_put, tree, shardings)  # noqa: E731
    with setup.context():
        arguments = (
            place(random_like(shapes, 1)),
            embeddings_of(setup),
            place(random_like(shapes, 3)),
        )
        compiled = jax.jit(update, out_shardings=shardings).lower(*arguments).compile()
        return compiled, compiled(*arguments)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "mesh"),
    [
        ("ode", {"data": 2, "fsdp": 2, "tensor": 2}),
        ("per_layer", {"fsdp": 8}),
        ("shared", {"data": 4, "fsdp": 2}),
    ],
)
def test_devices_exchange_nothing_while_they_iterate(kind, mesh, capfd):
    setup = setup_with(kind, **mesh)
    compiled, found = updates_of(setup)
    assert "Involuntary" not in capfd.readouterr().err
    times = {True: Counter(), False: Counter()}  # of collectives, and of products
    for each in executions(read_program(compiled.as_text())):
        opcode = each.instruction.opcode.removesuffix("-start")
        exchange = opcode in ("all-to-all", "all-gather", "all-reduce", "collective-permute")
        if exchange or opcode == "dot":
            times[exchange][each.times] += 1
    assert times[True].keys() == {1}
    assert times[False][5] >= 3 * 4  # three products of each kernel's iteration
    _, expected = updates_of(setup_with(kind))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), found, expected)


@pytest.mark.parametrize(
    ("spec", "split"),
    [
        (PartitionSpec(None, "rows", "columns"), (("rows",), ("columns",))),
        (PartitionSpec(None, ("rows", "columns")), (("rows", "columns"), ())),
        (PartitionSpec(), ((), ())),
    ],
)
def test_whole_matrices_come_back_in_their_places(spec, split):
    """Every device computes on a share of them, and on all rows and columns of each."""
    mesh = auto_mesh(copies=2, rows=2, columns=2)
    X = jnp.asarray(np.random.default_rng(0).normal(size=(6, 8, 12)), jnp.float32)
    shares = []

    def cube(X):
        shares.append(X.shape)
        return X @ X.mT @ X

    with jax.set_mesh(mesh):
        found = jax.jit(
            jax.shard_map(
                lambda x: map_whole_matrices(cube, x, *split),
                in_specs=spec,
                out_specs=spec,
                check_vma=False,
            )
        )(X)
    np.testing.assert_allclose(found, cube(X), rtol=1e-4, atol=1e-4)
    assert shares[0] == (1, 8, 12)  # of 6 on 8 devices


# ---------------------------------------------------------------------------- training


@pytest.mark.slow
@pytest.mark.in_turns("trainings")
def test_training_learns_and_resumes_bit_for_bit(text, tmp_path):
    """With microbatches, several depths and recomputation at once."""
    config = small_config(text)
    config.optimizer.update(name="muon", learning_rate=1e-2)
    config.model.remat = "full"
    config.mesh.fsdp = 1  # then the compiled step is kept for the next run
    config.train.update(microbatches=2, depths=(2, 3), depths_per_step=2, eval_batches=2)
    assert_learns_and_resumes(config, tmp_path)
