"""The moments lie in the host's memory between updates, and nothing else changes by that.

`several_processes` restore them in `restoring_test.py`.
"""

import importlib.util
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from helpers import metrics_of, setup_of, small_config, stop_after

from t5x_diffeq.checkpoints.local_checkpoints import LocalCheckpoints
from t5x_diffeq.checkpoints.stored import parts_of
from t5x_diffeq.checkpoints.writing import items_of
from t5x_diffeq.planner import planning, tables
from t5x_diffeq.planner.device_memory import least_memory
from t5x_diffeq.planner.hlo import read_program
from t5x_diffeq.planner.topology import Topology, make_topology
from t5x_diffeq.planner.trip_count import executions
from t5x_diffeq.runtime.config import Config
from t5x_diffeq.runtime.errors import InputError
from t5x_diffeq.training import programs
from t5x_diffeq.training import update as updates
from t5x_diffeq.training.host_memory import HOST, check_host_memory, is_on_host
from t5x_diffeq.verbs.train import train

LIBTPU = importlib.util.find_spec("libtpu") is not None
EXACT = jax.devices()[0].platform == "cpu"


def config_with(offload, **optimizer):
    """A small model on eight devices, with averages and a window of recent steps."""
    config = small_config("unused")
    config.mesh.update({"data": 2, "fsdp": 2, "tensor": 2} if jax.device_count() > 7 else {})
    config.train.update(ema_decay=0.9, on_spike="skip")
    config.optimizer.update(offload=offload, **optimizer)
    return config


@cache
def state_after(count, offload, **optimizer):
    """The setup, and the state after some steps on random tokens."""
    setup = setup_of(config_with(offload, **optimizer))
    with setup.context():
        step, state = programs.compile_train_step(setup, 8), setup.init_state()
        for batch in batches(setup, count):
            state, _ = step(state, batch)
    return setup, state


def batches(setup, count):
    """Batches of random tokens."""
    rng, shapes = np.random.default_rng(0), setup.abstract_batch(8)
    for _ in range(count):
        batch = {name: np.zeros(x.shape, x.dtype) for name, x in shapes.items()}
        batch["mask"] += 1
        for name in ("inputs", "targets"):
            batch[name] = rng.integers(0, 200, shapes[name].shape, np.int32)
        yield jax.device_put(batch, setup.batch_sharding)


def places(state):
    """The kinds of memory of the arrays of each part, without scalars."""
    return {
        name: {x.sharding.memory_kind for x in jax.tree.leaves(part) if x.ndim}
        for name, part in parts_of(state).items()
    }


OPTIMIZERS = [{"moments": "bfloat16"}, {"moments": "int8"}, {"name": "muon"}]


@pytest.mark.slow
def test_updates_are_those_without_it(sample):
    """On CPU bit for bit; the moments and averages come from the host, and go back there."""
    for optimizer in [{}, *sample(OPTIMIZERS)]:
        _, found = state_after(3, True, **optimizer)
        _, expected = state_after(3, False, **optimizer)
        expected_places = {"params": {"device"}, "opt_state": {HOST}, "averages": {HOST}}
        assert places(found).items() >= expected_places.items(), optimizer
        assert HOST not in set.union(*places(expected).values()), optimizer
        compare = np.testing.assert_array_equal if EXACT else np.testing.assert_allclose
        jax.tree.map(compare, found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [{}, {"name": "muon"}], ids=str)
def test_layer_by_layer(optimizer, monkeypatch):
    """As on accelerators: the numbers but for rounding; and a rejected step changes nothing."""
    monkeypatch.setattr(updates, "updates_by_layer", lambda setup: True)
    setup = setup_of(config_with(True, **optimizer))
    with setup.context():
        step, state = programs.compile_train_step(setup, 8), setup.init_state()
        for batch in batches(setup, 3):
            state, _ = step(state, batch)
        _, expected = state_after(3, False, **optimizer)
        assert places(state).items() >= {"opt_state": {HOST}, "averages": {HOST}}.items()
        for part in ("params", "averages"):
            for a, b in zip(
                jax.tree.leaves(getattr(state, part)),
                jax.tree.leaves(getattr(expected, part)),
                strict=True,
            ):
                np.testing.assert_allclose(a, b, atol=1e-4)
        (batch,) = batches(setup, 1)
        before = jax.tree.map(np.array, state)
        after, metrics = step(state, {**batch, "mask": batch["mask"] * np.nan})
    assert metrics["spike"]
    for part in ("params", "averages"):
        jax.tree.map(np.testing.assert_array_equal, getattr(after, part), getattr(before, part))
    pairs = zip(*map(jax.tree.leaves, (after.opt_state, before.opt_state)), strict=True)
    changed = [(x, y) for x, y in pairs if not np.array_equal(x, y)]
    assert [(int(x), int(y)) for x, y in changed] == [(4, 3)]  # the schedule's count


@pytest.mark.slow
def test_the_first_state_lies_there_too():
    setup, state = state_after(0, True)
    where = jax.tree.map(lambda x: x.sharding, (state, setup.abstract_state))
    assert where[0] == where[1]
    assert places(state)["opt_state"] == places(state)["averages"] == {HOST}


@pytest.mark.slow
def test_averages_that_begin_later_lie_there():
    setup, state = state_after(0, True)
    state = setup.complete(replace(state, averages=None))
    assert places(state)["averages"] == {HOST}
    averaged = state.averaged_params()
    assert not any(map(is_on_host, jax.tree.leaves(averaged)))  # for the eval step
    jax.tree.map(np.testing.assert_array_equal, averaged, state.params)


@pytest.mark.slow
def test_what_is_saved_is_a_copy():
    """Orbax reads it while the next step writes to the arrays that it was given."""
    _, state = state_after(0, True)
    saved = items_of(state, {})["state"].item

    def pointers(tree):
        shards = (x.addressable_shards for x in jax.tree.leaves(tree))
        return {shard.data.unsafe_buffer_pointer() for each in shards for shard in each}

    assert not pointers(saved) & pointers(parts_of(state))
    assert all(map(is_on_host, jax.tree.leaves(saved["averages"])))


@pytest.mark.slow
def test_local_checkpoints_are_read_into_either_memory(tmp_path):
    with_it, state = state_after(3, True)
    without, _ = state_after(3, False)
    local = LocalCheckpoints(str(tmp_path / "local"), tmp_path, "run")
    local.save(3, parts_of(state), {}, lambda save: None)
    local.wait()
    for setup, kind in ((with_it, HOST), (without, "device")):
        found, _ = local.read(3, parts_of(setup.abstract_state))
        assert {x.sharding.memory_kind for x in jax.tree.leaves(found["averages"])} == {kind}
        jax.tree.map(np.testing.assert_array_equal, found, parts_of(state))


# ---------------------------------------------------------------------------- whole runs


@pytest.mark.slow
def test_the_key_may_change_between_runs(text, tmp_path):
    """Stopped with or without, resumed otherwise: the numbers are those of a run without."""
    config = small_config(text)
    config.mesh.update(data=2, fsdp=4)
    config.train.update(
        total_steps=6, ema_decay=0.9, eval_averages=True, eval_batches=2, on_spike="rollback"
    )
    assert train(Config.of(config), tmp_path / "whole") == 0
    for before in (True, False):
        stopped = tmp_path / f"stopped-{before}"
        config.optimizer.offload = before
        assert stop_after(3, Config.of(config), stopped) == 42
        config.optimizer.offload = not before
        assert train(Config.of(config), stopped) == 0
        assert metrics_of(stopped) == metrics_of(tmp_path / "whole")


# ---------------------------------------------------------------------------- bytes and refusals


@pytest.mark.slow
def test_bytes_on_the_host_are_not_the_devices():
    with_it, without = (state_after(0, offload)[0] for offload in (True, False))
    params, moments, offloaded = planning.state_bytes(with_it)
    all_params, all_moments, none = planning.state_bytes(without)
    averages = all_params
    assert (params, none) == (all_params, 0)
    assert moments < 100  # counters
    assert moments + offloaded == all_moments + averages


@pytest.mark.slow
def test_a_plan_shows_both(capsys):
    """What is on the host is not needed on the device."""
    config = Config.of(config_with(True))
    topology = Topology("h100:8", 1, jax.devices(), "H100", "cpu")
    plans = {}
    for name, offload in (("host", True), ("device", False)):
        with_offload = config.with_values({"optimizer.offload": offload})
        setup = planning.plan_setup(with_offload, 256, topology)
        plans[name] = planning.plan_step(setup, 8, topology)
    host, device = (plans[name].memory for name in ("host", "device"))
    assert host.arguments + host.offloaded == device.arguments
    assert plans["host"].times.crossing == 2 * host.offloaded / 64e9
    assert plans["host"].times.low > plans["device"].times.low
    tables.print_plans(plans)
    assert "in the host's memory" in capsys.readouterr().err


@pytest.mark.slow
def test_what_must_fit():
    """What lies in the host's memory counts only where that is the device's, as on CPUs."""
    with_it, without = (state_after(0, offload)[0] for offload in (True, False))
    least = {of_host: least_memory(with_it, 8, of_host) for of_host in (True, False)}
    assert least[True] == least_memory(without, 8, False)
    assert least[True] - least[False] == planning.state_bytes(with_it)[-1]


def device(platform, *kinds):
    memories = [SimpleNamespace(kind=kind) for kind in kinds]
    return SimpleNamespace(
        platform=platform, device_kind="X1", addressable_memories=lambda: memories
    )


def test_platforms_that_cannot():
    with pytest.raises(InputError, match=r"offload needs .* pinned_host, and X1 has device; leave"):
        check_host_memory(device("tpu", "device"))
    with pytest.raises(InputError, match=r"jaxlib 0.11.0 computes wrong gradients on GPUs"):
        check_host_memory(device("gpu", "device", HOST), "0.11.0")
    check_host_memory(device("gpu", "device", HOST), "0.11.2")
    check_host_memory(device("tpu", "device", HOST), "0.11.0")


@pytest.mark.slow
@pytest.mark.skipif(not LIBTPU, reason="needs libtpu: pip install t5x_diffeq[tpu]")
def test_a_tpu_copies_a_layer_when_it_is_updated():
    """Not at the step's beginning; and nothing is copied from the host's memory into itself."""
    config = config_with(True)
    config.mesh.update(data=1, fsdp=4, tensor=1)
    topology = make_topology("v5e:2x2")
    setup = planning.plan_setup(Config.of(config), 256, topology)
    with setup.context():
        compiled = programs.lower_train_step(setup, 8).compile()
    memory, program = compiled.memory_analysis(), read_program(compiled.as_text())
    assert memory.host_argument_size_in_bytes >= planning.state_bytes(setup)[-1]
    assert memory.host_alias_size_in_bytes == memory.host_argument_size_in_bytes
    assert memory.host_temp_size_in_bytes == 0
    moved = {
        (execution.computation == program.entry, execution.times)
        for execution in executions(program)
        if execution.instruction.opcode == "copy-start" and "S(5)" in execution.instruction.type
    }
    assert moved == {(False, 1)}
