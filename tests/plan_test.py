"""A step is planned without being run: what it needs, what it moves, and what would fit."""

import importlib.util
import json
import os
import subprocess
import sys

import jax
import pytest
from conftest import ROOT

from configs import default
from t5x_diffeq import command_line, plan
from t5x_diffeq.errors import InputError
from t5x_diffeq.training import planning
from t5x_diffeq.training.chips import CHIPS, GIB
from t5x_diffeq.training.collectives import Collective
from t5x_diffeq.training.plan_search import remedies, sweep_configs
from t5x_diffeq.training.program import shapes
from t5x_diffeq.training.topology import topology_devices

SMALL = {
    "model.num_steps": 2,
    "model.embed_dim": 32,
    "model.mlp_dim": 64,
    "model.time_embed_dim": 4,
    "model.num_frequencies": 4,
    "data.sequence_length": 32,
    "data.tokenizer": "bytes",
    "train.batch_size": 16,
}
KEYS = {"name", "topology", "mesh", "fits", "memory", "flops", "collectives", "seconds", "mfu"}
LIBTPU = importlib.util.find_spec("libtpu") is not None


def small(**keys):
    config = default.get_config()
    config.update_from_flattened_dict({**SMALL, **keys})
    return default.set_variant(config, "baseline")  # it compiles twice as fast


def planned(topology, *arguments):
    """The verb in a process of its own, which has no devices but those that the verb makes."""
    environment = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    keys = [f"--config.{key}={value}" for key, value in SMALL.items()]
    verb = [sys.executable, "-m", "t5x_diffeq.plan", "--config=configs/default.py"]
    return subprocess.run(
        [*verb, f"--topology={topology}", *keys, *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )


@pytest.mark.slow
def test_on_virtual_cpu_devices():
    """Two of the eight places of the mesh have each parameter: what that costs is told."""
    done = planned("cpu:8", "--config.mesh.tensor=2", "--config.mesh.data=2")
    assert done.returncode == 0, done.stderr
    assert "model: mesh.data=2 keeps as many copies" in done.stderr
    assert "mesh.data=1 with mesh.fsdp=4 would spare" in done.stderr
    model, baseline = map(json.loads, done.stdout.splitlines())
    assert (model["name"], baseline["name"]) == ("model", "baseline")
    assert model.keys() >= KEYS
    assert model["mesh"] == {"data": 2, "fsdp": 2, "tensor": 2}
    assert model["memory"]["parameters"] > baseline["memory"]["parameters"]
    assert model["memory"]["moments"] == pytest.approx(2 * model["memory"]["parameters"], rel=0.01)
    for kind, moved in model["collectives"].items():
        assert moved["bytes"] <= 1.05 * baseline["collectives"][kind]["bytes"], kind
    assert model["fits"] is None  # for a CPU nothing says what there is
    assert model["seconds"] is None
    assert "temporaries" in done.stderr and "ratio" in done.stderr


@pytest.mark.slow
@pytest.mark.skipif(not LIBTPU, reason="needs libtpu: pip install t5x_diffeq[tpu]")
def test_on_tpus_that_are_not_there():
    done = planned("v5e:2x2", "--config.model.dtype=bfloat16", "--config.data.sequence_length=128")
    assert done.returncode == 0, done.stderr
    model, baseline = map(json.loads, done.stdout.splitlines())
    assert model["device_kind"] == "TPU v5 lite"
    assert model["attention"] == "splash"
    assert model["fits"] and baseline["fits"]
    assert 0 < model["mfu"] < 1
    assert model["seconds"]["step"] > 0


@pytest.mark.skipif(LIBTPU, reason="libtpu is installed")
def test_without_libtpu():
    with pytest.raises(InputError, match=r'pip install "t5x_diffeq\[tpu\]"'):
        topology_devices("v5p:4x4x4")


@pytest.mark.skipif(not LIBTPU, reason="needs libtpu: pip install t5x_diffeq[tpu]")
def test_a_topology_that_is_not():
    with pytest.raises(InputError, match="--topology=v99:2x2 is not known to the TPU's compiler"):
        topology_devices("v99:2x2")


@pytest.mark.parametrize(
    ("topology", "message"),
    [
        ("v5p", "it is written like v5p:4x4x4"),
        ("8 CPUs", "it is written like v5p:4x4x4"),
        ("cpu:2x2", "give a count, as in cpu:8"),
        ("cpu:0", "give a count, as in cpu:8"),
        ("cpu:99", "JAX has 8 CPU devices"),
    ],
)
def test_bad_topologies(topology, message):
    with pytest.raises(InputError, match=message):
        topology_devices(topology)


def test_arguments_are_needed():
    plan.FLAGS.unparse_flags()
    command_line.parse(["plan"], plan.FLAGS)
    with pytest.raises(InputError, match="plan needs --config=FILE and --topology="):
        plan.main()


@pytest.mark.slow
def test_sweep_ranks_what_it_tries(capsys):
    plan.FLAGS.unparse_flags()
    command_line.parse(["plan", "--topology=cpu:1"], plan.FLAGS)
    plan.sweep(small(), jax.devices()[:1])
    told = capsys.readouterr()
    tried = {line["remat"]: line for line in map(json.loads, told.out.splitlines())}
    assert tried.keys() == {"full", "none", "dots"}
    first, *_ = (line for line in told.err.splitlines() if "data 1 x fsdp 1 x tensor 1  " in line)
    least = min(tried.values(), key=lambda line: line["memory_traffic"])
    assert least["remat"] in first  # without estimates of time, by bytes moved
    assert "0 of 3 don't fit" in told.err


def test_sweep_tries_what_divides():
    tried = [
        tuple(c.mesh[a] for a in ("data", "fsdp", "tensor")) for c in sweep_configs(small(), 8)
    ]
    assert tried[0] == (1, 8, 1)
    assert len(tried) == 3 * len(set(tried))
    assert set(tried) >= {(2, 4, 1), (8, 1, 1), (1, 4, 2), (2, 1, 4)}
    assert all(data * fsdp * tensor == 8 for data, fsdp, tensor in tried)
    assert not any(tensor == 8 for _, _, tensor in tried)  # there are four heads
    narrow = {
        tuple(c.mesh.values())[:2] for c in sweep_configs(small(**{"train.batch_size": 2}), 8)
    }
    assert narrow == {(1, 2), (2, 1)}


def test_remedies_keep_to_what_divides():
    mesh = {"data": 2, "fsdp": 2, "tensor": 2}
    tried = dict(remedies(small(**{"train.batch_size": 8, "model.remat": "dots"}), mesh))
    assert next(iter(tried)) == "--config.model.remat=full"
    assert "--config.model.remat=full --config.mesh.data=1 --config.mesh.fsdp=4" in tried
    assert "--config.model.remat=full --config.train.microbatches=2" in tried
    assert not any("microbatches=4" in flags for flags in tried)  # two rows on each device
    for flags, config in tried.items():
        for flag in flags.split():
            key, value = flag.removeprefix("--config.").split("=")
            group, name = key.split(".")
            assert str(config[group][name]) == value


@pytest.mark.slow
def test_what_does_not_fit_is_said_and_helped(monkeypatch, capsys):
    config, devices = small(**{"model.remat": "none"}), jax.devices()[:1]
    needed = plan.make_plan("model", config, devices).memory.needed
    chip = planning.Chip(1e12, 0.99 * needed, 1e9, 1e9, 1)
    monkeypatch.setattr(planning, "device_chip", lambda setup: chip)
    made = plan.make_plan("model", config, devices)
    assert made.memory.fits is False
    assert "model: does not fit" in plan.verdict("model", made)
    assert plan.rank([made]) == []
    plan.advise(config, made, devices)
    told = capsys.readouterr().err
    found = [line for line in told.splitlines() if line.startswith("fits with --config.")]
    assert len(found) == 1


@pytest.mark.parametrize(
    ("message", "needed", "available"),
    [
        (
            "memory required for HLO temporaries (20.5G) exceeds available HBM (15.75G).",
            20.5,
            15.75,
        ),
        ("Ran out of memory in memory space hbm. Used 112.46G of 95.74G hbm.", 112.46, 95.74),
    ],
)
def test_the_compilers_refusal_is_read(message, needed, available):
    setup = plan.make_setup(small(), 256, jax.devices()[:1])
    memory = planning.refused(setup, jax.errors.JaxRuntimeError(f"RESOURCE_EXHAUSTED: {message}"))
    assert (memory.needed, memory.available) == (needed * GIB, available * GIB)
    assert memory.fits is False
    with pytest.raises(jax.errors.JaxRuntimeError, match="something else"):
        planning.refused(setup, jax.errors.JaxRuntimeError("something else"))


def test_time_on_the_links():
    v5p = CHIPS["TPU v5p"]

    def seconds(kind, devices):
        it = Collective(kind, tuple(shapes("f32[150000000]")), 2, devices, "", "", False)
        return planning.link_seconds(it, v5p, 4)  # 1.2 GB, 600 GB/s

    assert seconds("all-gather", 4) == seconds("reduce-scatter", None) == pytest.approx(1.5e-3)
    assert seconds("all-reduce", 4) == pytest.approx(3e-3)
    assert seconds("collective-permute", None) == pytest.approx(12e-3)  # over one link of six
    estimate = planning.Times(compute=5, kernels=1, waited=2, overlapped=3)
    assert estimate.step == 8
    assert planning.Times(compute=1, kernels=1, waited=2, overlapped=3).step == 5
