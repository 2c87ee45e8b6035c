"""A step is planned without being run: what it needs, what it moves, and what would fit."""

import dataclasses
import functools
import importlib.util
import json
import os
import re
import subprocess
import sys

import jax
import pytest
from helpers import ROOT, call
from patience import patience

from configs import default
from t5x_diffeq.cli import plan as verb
from t5x_diffeq.planner import candidates, planning, tables
from t5x_diffeq.planner.bounds import Bound, lower_bound, moved_bytes
from t5x_diffeq.planner.candidates import PlanSearch
from t5x_diffeq.planner.estimate import StepTimes
from t5x_diffeq.planner.flops import step_flops
from t5x_diffeq.planner.planning import plan_setup
from t5x_diffeq.planner.search import POLICIES, meshes, remedies
from t5x_diffeq.planner.topology import Topology, make_topology
from t5x_diffeq.runtime.chips import CHIPS, GIB
from t5x_diffeq.runtime.config import Config
from t5x_diffeq.runtime.errors import InputError
from t5x_diffeq.training.partitioning import make_mesh
from t5x_diffeq.verbs import plan

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
CPU = Topology("cpu:1", 1, jax.devices()[:1], "cpu", "cpu")
EIGHT_CPUS = Topology("cpu:8", 1, jax.devices(), "cpu", "cpu")
EIGHT = Topology("h100:8", 1, jax.devices(), "H100", "cpu")
LIBTPU = importlib.util.find_spec("libtpu") is not None


def small(**keys):
    config = default.get_config()
    config.update_from_flattened_dict({**SMALL, **keys})
    return Config.of(default.set_variant(config, "baseline"))  # it compiles twice as fast


def run_plan(name, *arguments):
    """The verb in a process of its own, which has no devices but those that the verb makes."""
    environment = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    keys = [f"--config.{key}={value}" for key, value in SMALL.items()]
    verb = [sys.executable, "-m", "t5x_diffeq.plan", "--config=configs/default.py"]
    return subprocess.run(
        [*verb, f"--topology={name}", *keys, *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=patience(600),
    )


@pytest.mark.slow
def test_on_virtual_cpu_devices():
    """Two of the eight places of the mesh have each parameter: what that costs is told."""
    done = run_plan("cpu:8", "--config.mesh.tensor=2", "--config.mesh.data=2")
    assert done.returncode == 0, done.stderr
    assert "model: mesh.data=2 keeps as many copies" in done.stderr
    assert "mesh.data=1 with mesh.fsdp=4 would spare" in done.stderr
    model, baseline = map(json.loads, done.stdout.splitlines())
    assert (model["name"], baseline["name"]) == ("model", "baseline")
    assert model.keys() >= KEYS
    assert model["mesh"] == {
        "stage": 1,
        "data": 2,
        "fsdp": 2,
        "expert": 1,
        "context": 1,
        "tensor": 2,
    }
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
    keys = ("--config.model.dtype=bfloat16", "--config.data.sequence_length=128")
    done = run_plan("v5e:2x2", "--slices=2", *keys)
    assert done.returncode == 0, done.stderr
    model, baseline = map(json.loads, done.stdout.splitlines())
    assert model["device_kind"] == "TPU v5 lite"
    assert (model["slices"], model["mesh"]["data"]) == (2, 2)
    assert model["attention"] == "splash"
    assert model["fits"] and baseline["fits"]
    assert 0 < model["mfu"][0] < model["mfu"][1] < 1
    assert 0 < model["seconds"]["low"] < model["seconds"]["high"]
    assert "No TPU has confirmed" in done.stderr


@pytest.mark.skipif(LIBTPU, reason="libtpu is installed")
def test_without_libtpu():
    with pytest.raises(InputError, match=r'pip install "t5x_diffeq\[tpu\]"'):
        make_topology("v5p:4x4x4")


@pytest.mark.skipif(not LIBTPU, reason="needs libtpu: pip install t5x_diffeq[tpu]")
def test_a_topology_that_is_not():
    with pytest.raises(InputError, match="--topology=v99:2x2 is not known to the TPU's compiler"):
        make_topology("v99:2x2")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("v5p", "it is written like v5p:4x4x4"),
        ("8 CPUs", "it is written like v5p:4x4x4"),
        ("cpu:2x2", "give a count of devices, as in cpu:8"),
        ("cpu:0", "give a count of devices, as in cpu:8"),
        ("cpu:99", "JAX has 8 CPU devices"),
        ("h100:64", "JAX has 8 CPU devices"),
    ],
)
def test_bad_topologies(name, message):
    with pytest.raises(InputError, match=message):
        make_topology(name)


@pytest.mark.parametrize(
    ("name", "slices", "message"),
    [("cpu:8", 2, "only TPUs have slices"), ("v5p:4x4x4", 0, "--slices=0: it must be at least 1")],
)
def test_bad_slices(name, slices, message):
    with pytest.raises(InputError, match=message):
        make_topology(name, slices)


def test_arguments_are_needed():
    with pytest.raises(InputError, match="plan needs --config=FILE and --topology="):
        call(verb)


@pytest.mark.slow
def test_sweep_on_one_device(capsys):
    """On a CPU nothing is skipped: there is no estimate, so bytes moved decide."""
    config = small(**{"model.remat": "dots"})
    plan.sweep(config, CPU)
    told = capsys.readouterr()
    tried = [json.loads(line) for line in told.out.splitlines()]
    assert {line["remat"] for line in tried} == set(POLICIES)
    assert {line["microbatches"] for line in tried} == {1, 2}
    best = min(tried, key=bytes_moved)
    flags = told.err.splitlines()[-1].split()
    assert "--config.mesh.fsdp=1" in flags
    if best["remat"] != "dots":
        assert f"--config.model.remat={best['remat']}" in flags
    assert ("--config.train.microbatches=2" in flags) == (best["microbatches"] == 2)
    assert "meshes, 1 of at most 1: data 1 x fsdp 1 x tensor 1" in told.err


def bytes_moved(line):
    return line["memory_traffic"] + sum(c["bytes"] for c in line["collectives"].values())


def meshes_tried(**keys):
    slices = keys.pop("slices", 1)
    return [
        tuple(mesh[axis] for axis in ("data", "fsdp", "tensor"))
        for mesh in meshes(small(**keys), 8, slices)
    ]


def test_meshes_are_those_that_divide():
    tried = meshes_tried()
    assert tried[0] == (1, 8, 1)
    assert len(tried) == len(set(tried))
    assert set(tried) >= {(2, 4, 1), (8, 1, 1), (1, 4, 2), (2, 1, 4)}
    assert all(data * fsdp * tensor == 8 for data, fsdp, tensor in tried)
    assert not any(tensor == 8 for _, _, tensor in tried)  # there are four heads
    assert {mesh[:2] for mesh in meshes_tried(**{"train.batch_size": 2})} == {(1, 2), (2, 1)}
    in_stages = meshes_tried(**{"mesh.stage": 2})
    assert in_stages[0] == (1, 4, 1)
    assert all(data * fsdp * tensor == 4 for data, fsdp, tensor in in_stages)
    assert {data for data, _, _ in meshes_tried(slices=4)} == {4, 8}


@functools.cache
def one_setup():
    return plan_setup(small(), 256, EIGHT)


def quick_setup(config, *_):
    """One setup, on the mesh of a config."""
    mesh = make_mesh(config.mesh, config.train.batch_size, EIGHT.devices)
    return dataclasses.replace(one_setup(), mesh=mesh)


@dataclasses.dataclass
class FakePlans:
    """A sweep's compiler whose steps take what a table says, by remat and data."""

    seconds: dict
    compiled: list = dataclasses.field(default_factory=list)

    def __call__(self, title, config):
        self.compiled.append((config.mesh.data, config.model.remat, config.train.microbatches))
        low = self.seconds.get(self.compiled[-1], self.seconds["else"])
        made = quick_setup(config)
        times = StepTimes(low, 0, 0, 0, 0, 0, low, low)
        memory = planning.DeviceMemory(1, 1, 0, 1, 1, 1, 1, 1e9, 1)
        flops = step_flops(made.model.config, 16)
        return planning.Plan(made, 16, EIGHT, memory, flops, times=times)


def fake_sweep(monkeypatch, seconds, bounds):
    def bound(setup, batch_size, figures):
        return Bound(bounds.get(setup.mesh.shape["data"], 1), 0)

    monkeypatch.setattr(candidates, "lower_bound", bound)
    monkeypatch.setattr(candidates, "plan_setup", quick_setup)
    monkeypatch.setattr(candidates, "with_meshes", lambda *_: MESHES)
    fake = FakePlans(seconds)
    search = PlanSearch(small(**{"model.remat": "full"}), 256, EIGHT, fake)
    return search.run(), fake.compiled, search.skipped


MESHES = [{"mesh.data": n, "mesh.fsdp": 8 // n, "mesh.tensor": 1} for n in (1, 2, 4, 8)]


def test_a_sweep_goes_by_stages_and_skips_what_can_not_win(monkeypatch):
    seconds = {(2, "full", 1): 5, (4, "full", 1): 6, (4, "none", 1): 3, "else": 7}
    found, compiled, skipped = fake_sweep(monkeypatch, seconds, {1: 9, 2: 2, 8: 4})
    assert compiled[0] == (4, "full", 1)  # its bound is the lowest
    assert compiled[1:3] == [(2, "full", 1), (8, "full", 1)]  # 9 is beyond any
    rest = compiled[3:]
    assert {(data, remat) for data, remat, parts in rest if parts == 1} == {
        (data, remat) for data in (2, 4) for remat in POLICIES if remat != "full"
    }
    assert [c for c in compiled if c[2] > 1] == [(4, "none", 2)]  # of the best alone
    assert found[0][0] == MESHES[2] | {"model.remat": "none"}
    assert skipped == 1


def test_a_sweep_where_nothing_fits(monkeypatch):
    monkeypatch.setattr(candidates, "lower_bound", lambda *_: Bound(1, 1e15))
    monkeypatch.setattr(candidates, "plan_setup", quick_setup)
    with pytest.raises(InputError, match="nothing fits h100:8; take a larger topology"):
        PlanSearch(small(), 256, EIGHT, FakePlans({"else": 1})).run()


def test_the_columns_of_a_sweep_stay_apart(monkeypatch, capsys):
    """Also with the longest remat policy, the smallest memory, and a step under a millisecond."""
    seconds = {"else": 0.000648}
    found, _, _ = fake_sweep(monkeypatch, seconds, {})
    tables.show_ranked([("--flag", plan) for _, plan in found])
    _, *rows = capsys.readouterr().err.splitlines()
    assert len(rows) == len(found)
    for row in rows:
        *_, needed, step, flags = re.split(r"\s{2,}", row)
        assert (step, flags) == ("0.648 to 0.648 ms", "--flag")
        assert needed.endswith("iB")


@pytest.mark.slow
def test_the_bound_says_what_a_mesh_costs():
    """More copies of the state are made and read; a larger fsdp moves more, tensor activations."""
    config, figures = small(**{"model.embed_dim": 64}), CHIPS["TPU v5p"]

    def bound(sizes):
        setup = plan_setup(config.with_values(sizes), 256, EIGHT)
        return lower_bound(setup, 16, figures), moved_bytes(setup, 16)

    whole, moved = bound({"mesh.fsdp": 8})
    repeated, less = bound({"mesh.data": 8, "mesh.fsdp": 1})
    tensor, more = bound({"mesh.data": 4, "mesh.fsdp": 1, "mesh.tensor": 2})
    assert repeated.bytes == pytest.approx(8 * whole.bytes, rel=0.1)
    weights = 2 * 4 * (4 * 64 * 64 + 2 * 64 * 64)  # two layers, float32
    assert moved == pytest.approx(3 * weights * 7 / 8)
    assert less == pytest.approx(2 * weights * 7 / 8)
    activations = 4 * 2 * 16 * 32 / 4 * 64 * 4
    assert more == pytest.approx(2 * weights / 2 * 3 / 4 + activations)
    assert tensor.seconds > more / figures.link_bandwidth
    staged, crossed = bound({"mesh.stage": 2, "mesh.data": 4, "mesh.fsdp": 1})
    assert staged.bytes == pytest.approx(4 * whole.bytes, rel=0.1)
    assert crossed == pytest.approx(3 * 2 * weights / 2 * 3 / 4)  # of a stage's layer, three ticks


def test_remedies_keep_to_what_divides():
    mesh = {"stage": 1, "data": 2, "fsdp": 2, "expert": 1, "context": 1, "tensor": 2}
    tried = dict(remedies(small(**{"train.batch_size": 8, "model.remat": "dots"}), mesh))
    assert next(iter(tried)) == "--config.model.remat=keep:qkv,attention,mlp"
    assert "--config.model.remat=full" in tried
    assert "--config.model.remat=full --config.mesh.data=1 --config.mesh.fsdp=4" in tried
    assert "--config.model.remat=full --config.train.microbatches=2" in tried
    assert not any("microbatches=4" in flags for flags in tried)  # two rows on each device
    for flags, config in tried.items():
        for flag in flags.split():
            key, value = flag.removeprefix("--config.").split("=")
            assert str(config.flat()[key]) == value


@pytest.mark.slow
def test_what_does_not_fit_is_said_and_helped(monkeypatch, capsys):
    config = small(**{"model.remat": "none"})
    needed = plan.make_plan("model", config, CPU).memory.needed
    tight = planning.Chip(1e12, 0.99 * needed, 1e9, 1e9, 1, 1e9)
    monkeypatch.setitem(CHIPS, "H100", tight)
    one = Topology("h100:1", 1, jax.devices()[:1], "H100", "cpu")
    made = plan.make_plan("model", config, one)
    assert made.memory.fits is False
    assert tables.verdict(made).startswith("does not fit")
    plan.advise(config, made, one)
    told = capsys.readouterr().err
    found = [line for line in told.splitlines() if line.startswith("fits with --config.")]
    assert len(found) == 1


@pytest.mark.slow
def test_gpus_are_counted_on_virtual_devices(capsys):
    """The kernel's stand-in keeps what cuDNN keeps: no scores of [length, length] are anywhere."""
    keys = {"model.dtype": "bfloat16", "data.sequence_length": 512, "model.remat": "none"}
    fused = plan.make_plan("model", small(**keys), EIGHT)
    plain = plan.make_plan("model", small(**{**keys, "model.attention": "xla"}), EIGHT_CPUS)
    assert fused.setup.model.config.attention == "stand-in"
    scores = 2 * 4 * 512 * 512 * 4  # of a device's two rows and four heads, in float32
    assert plain.memory.temporaries - fused.memory.temporaries > scores
    assert 0 < fused.times.low < fused.times.high
    assert fused.mfu[0] < fused.mfu[1] < 1
    tables.print_plans({"model": fused})
    told = capsys.readouterr().err
    assert "40%" in told and "bfloat16" in told and "float32" in told


def test_jax_must_be_told_to_take_most_of_a_gpu():
    one = Topology("h200:1", 1, jax.devices()[:1], "H200", "cpu")
    setup = one_setup()
    flops = step_flops(setup.model.config, 16)

    def remark(needed):
        memory = planning.DeviceMemory(1, 1, 0, 1, 1, 1, 1, CHIPS["H200"].memory_bytes, needed)
        return tables.memory_share(planning.Plan(setup, 16, one, memory, flops))

    assert "79%" in remark(111.8e9) and "75%" in remark(111.8e9)
    assert remark(100e9) is None
    assert remark(150e9) is None  # it doesn't fit at all, which is said elsewhere


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
    setup = plan_setup(small(), 256, CPU)
    memory = planning.read_refusal(
        setup, jax.errors.JaxRuntimeError(f"RESOURCE_EXHAUSTED: {message}")
    )
    assert (memory.needed, memory.available) == (needed * GIB, available * GIB)
    assert memory.fits is False
    with pytest.raises(jax.errors.JaxRuntimeError, match="something else"):
        planning.read_refusal(setup, jax.errors.JaxRuntimeError("something else"))
