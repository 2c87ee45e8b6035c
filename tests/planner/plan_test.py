"""A step is planned without being run: what it needs, what it moves, and whether it fits."""

import dataclasses
import functools
import importlib.util
import json
import os
import re
import sys

import jax
import pytest
from helpers import ROOT, mesh_shape, run_to_end

from configs import default
from t5x_diffeq.cli import plan
from t5x_diffeq.config.config import Config
from t5x_diffeq.data.file_tokenizers import SentencePieceTokenizer
from t5x_diffeq.model.flops import step_flops
from t5x_diffeq.planner import planning, search, tables
from t5x_diffeq.planner.collectives import Traffic
from t5x_diffeq.planner.estimate import StepTimes
from t5x_diffeq.planner.planning import plan_setup
from t5x_diffeq.planner.program_cost import ProgramCost
from t5x_diffeq.planner.search import POLICIES, meshes
from t5x_diffeq.planner.topology import Topology, make_topology
from t5x_diffeq.planner.vocabulary import planned_vocab_size
from t5x_diffeq.system.chips import CHIPS, GIB, Chip
from t5x_diffeq.system.errors import InputError
from t5x_diffeq.training.partitioning import make_mesh

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
H100 = "NVIDIA H100 80GB HBM3"
EIGHT = Topology("h100:8", 1, jax.devices(), H100, "cpu")
SMOOTH = ROOT / "examples" / "smooth"
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
    return run_to_end([*verb, f"--topology={name}", *keys, *arguments], env=environment)


@pytest.mark.slow
def test_on_virtual_cpu_devices():
    done = run_plan("cpu:8", "--config.mesh.tensor=2", "--config.mesh.data=2")
    assert done.returncode == 0, done.stderr
    model, baseline = map(json.loads, done.stdout.splitlines())
    assert (model["name"], baseline["name"]) == ("model", "baseline")
    assert model.keys() >= KEYS
    assert model["mesh"] == mesh_shape(data=2, fsdp=2, tensor=2)
    assert model["memory"]["parameters"] > baseline["memory"]["parameters"]
    assert model["memory"]["moments"] == pytest.approx(2 * model["memory"]["parameters"], rel=0.01)
    for kind, moved in model["collectives"].items():
        assert moved["bytes"] <= 1.05 * baseline["collectives"][kind]["bytes"], kind
    assert model["fits"] is None  # for a CPU nothing says what there is
    assert model["seconds"] is None
    assert "temporaries" in done.stderr and "ratio" in done.stderr


@pytest.mark.slow
@pytest.mark.skipif(not LIBTPU, reason="needs libtpu: pip install -e '.[tpu]'")
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
    with pytest.raises(InputError, match=r"pip install -e '/.*\[tpu\]'"):
        make_topology("v5p:4x4x4")


@pytest.mark.skipif(not LIBTPU, reason="needs libtpu: pip install -e '.[tpu]'")
def test_a_topology_that_is_not():
    with pytest.raises(InputError, match="--topology=v5p:3x5x7 is not known to the TPU's compil"):
        make_topology("v5p:3x5x7")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("v5p", "it must have the form v5p:4x4x4"),
        ("v99:2x2", "v99 isn't known; there are the TPUs v2, v3, v4, v5e"),
        ("8 CPUs", "it must have the form v5p:4x4x4"),
        ("cpu:2x2", "give a count of devices, as in cpu:8"),
        ("cpu:0", "give a count of devices, as in cpu:8"),
        ("cpu:99", "JAX has 8 CPU devices"),
        ("H100:64", r"pip install -e '/.*\[gpu_compiler\]'"),
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
    assert "meshes, 1 of 1: data 1 x fsdp 1 x tensor 1" in told.err


def bytes_moved(line):
    return line["memory_traffic"] + sum(c["bytes"] for c in line["collectives"].values())


def meshes_tried(**keys):
    slices = keys.pop("slices", 1)
    return [
        tuple(mesh[axis] for axis in ("data", "fsdp", "tensor"))
        for mesh in meshes(small(**keys), 8, slices)
    ]


@pytest.mark.parametrize(
    ("keys", "size", "said"),
    [
        ({"data.tokenizer": "bytes"}, 256, ""),
        ({"data.tokenizer": "sentencepiece"}, 4096, ""),  # it is trained
        ({"data.source": "tokens", "data.path": str(SMOOTH / "data" / "0")}, 256, ""),
        ({"data.source": "tokens", "model.vocab_size": 99}, 99, ""),
        ({"data.tokenizer": "missing.json"}, 4096, "a vocabulary of 4096 is assumed"),
    ],
)
def test_a_plan_has_the_vocabulary_of_the_tokenizer(keys, size, said, capsys):
    assert planned_vocab_size(small(**keys)) == size
    assert planned_vocab_size(small(**keys, **{"model.remat": "none"})) == size
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == bool(said) and said in "".join(lines)


def test_a_plan_has_the_vocabulary_of_a_tokenizers_file(tmp_path):
    tokenizer = SentencePieceTokenizer.train(["Some text, and other text.\n"] * 20, 280)
    (tmp_path / "sentencepiece.model").write_bytes(tokenizer.model)
    keys = {"data.tokenizer": str(tmp_path / "sentencepiece.model")}
    assert planned_vocab_size(small(**keys)) == tokenizer.vocab_size


def test_meshes_are_those_that_divide():
    tried = meshes_tried()
    assert tried[0] == (1, 8, 1)
    assert len(tried) == len(set(tried))
    assert set(tried) >= {(2, 4, 1), (8, 1, 1), (1, 4, 2), (2, 1, 4)}
    assert all(data * fsdp * tensor == 8 for data, fsdp, tensor in tried)
    assert not any(tensor == 8 for _, _, tensor in tried)  # there are four heads
    assert {mesh[:2] for mesh in meshes_tried(**{"train.batch_size": 2})} == {(1, 2), (2, 1)}
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
    """A sweep's compiler whose steps take what a table says; None: they don't fit."""

    seconds: dict
    compiled: list = dataclasses.field(default_factory=list)

    def __call__(self, title, config):
        self.compiled.append((config.mesh.data, config.model.remat, config.train.microbatches))
        low = self.seconds.get(self.compiled[-1], self.seconds["else"])
        made = quick_setup(config)
        needed, low = (1, low) if low is not None else (2e9, 1)
        times = StepTimes(low, 0, 0, 0, 0, low, low)
        memory = planning.DeviceMemory(1, 1, 1, 1, 1, 1, 1e9, needed)
        flops = step_flops(made.model.config, 16)
        return planning.Plan(made, 16, EIGHT, memory, flops, times=times)


def fake_sweep(monkeypatch, seconds):
    monkeypatch.setattr(search, "plan_setup", quick_setup)
    fake = FakePlans(seconds)
    return search.search(small(**{"model.remat": "full"}), 256, EIGHT, fake), fake.compiled


def test_a_sweep_goes_by_stages(monkeypatch):
    seconds = {(2, "full", 1): 5, (4, "full", 1): 6, (2, "none", 1): 3, "else": 7}
    plans, compiled = fake_sweep(monkeypatch, seconds)
    assert compiled[:4] == [(data, "full", 1) for data in (1, 2, 4, 8)]
    rest = [c for c in compiled if c[1:] != ("full", 1)]
    assert rest == [*((2, remat, 1) for remat in POLICIES if remat != "full"), (2, "none", 2)]
    changes, _ = plans[0]
    assert (changes["mesh.data"], changes["model.remat"]) == (2, "none")


def test_a_sweep_finds_microbatches_where_nothing_else_fits(monkeypatch):
    seconds = {(1, "full", 2): 5, "else": None}
    plans, _ = fake_sweep(monkeypatch, seconds)
    changes, _ = plans[0]
    assert changes["train.microbatches"] == 2
    with pytest.raises(InputError, match="no plan fits h100:8; take a larger topology"):
        fake_sweep(monkeypatch, {"else": None})


@pytest.mark.slow
def test_what_does_not_fit_is_said(monkeypatch):
    config = small(**{"model.remat": "none"})
    needed = plan.make_plan("model", config, CPU).memory.needed
    monkeypatch.setitem(CHIPS, H100, Chip(1e12, 0.99 * needed, 1e9, 1e9, 1, 1e9))
    made = plan.make_plan("model", config, Topology("h100:1", 1, jax.devices()[:1], H100, "cpu"))
    assert made.memory.fits is False
    assert re.match("does not fit: .*; --sweep looks for", tables.verdict(made))


def test_every_figure_of_a_plan(monkeypatch, capsys):
    made = one_setup()
    options = {"xla_limit": 49152, "xla_offload": True}
    monkeypatch.setattr(type(made), "step_options", options)
    flops = step_flops(made.model.config, 16)
    peak = flops.model / 8 / 0.02 / 0.25  # a quarter of it is reached in 20 ms
    monkeypatch.setitem(CHIPS, H100, Chip(peak, 16 * GIB, 1, 1, 1, 1))
    memory = planning.DeviceMemory(
        GIB, 2 * GIB, 4 * GIB, 2**20, 8 * GIB, 2**21, 16 * GIB, 12.5 * GIB
    )
    moved = {"all-gather": Traffic(3, 3 * GIB), "all-reduce": Traffic(2, GIB, 1, 1, 2**29)}
    times = StepTimes(0.001, 0.002, 0.003, 0.004, 0.005, 0.01, 0.02)
    one = planning.Plan(
        *(made, 16, EIGHT, memory, flops, ProgramCost(5 * GIB, None)),
        *(moved, {"all-reduce": Traffic(1, GIB // 4)}, times),
    )
    record = json.loads(json.dumps(tables.plan_record(one)))
    low, high = record.pop("mfu")
    assert (low, high) == (pytest.approx(0.25), pytest.approx(0.5))
    seconds = {"compute": 0.001, "kernels": 0.002, "waited": 0.003, "overlapped": 0.004}
    flop_record = {**dataclasses.asdict(flops), "model": flops.model, "total": flops.total}
    nothing = {"synchronous": 0, "padded": 0, "padding": 0}
    assert record == {
        **{"topology": "h100:8", "slices": 1, "nodes": 1, "mesh": mesh_shape(fsdp=8)},
        **{"device_kind": H100, "compiled_by": "cpu", "remat": made.model.config.remat},
        **{"microbatches": 1, "attention": made.model.config.attention, "batch_size": 16},
        **{"compiler_options": options, "fits": True, "flops": flop_record},
        "memory": {
            **{"parameters": GIB, "moments": 2 * GIB, "arguments": 4 * GIB, "outputs": 2**20},
            **{"temporaries": 8 * GIB, "program": 2**21, "available": 16 * GIB},
            "needed": 12.5 * GIB,
        },
        "memory_traffic": 5 * GIB,
        "collectives": {
            "all-gather": {"executions": 3, "bytes": 3 * GIB, **nothing},
            "all-reduce": Traffic(2, GIB, 1, 1, 2**29)._asdict(),
        },
        "between_nodes": {"all-reduce": {"executions": 1, "bytes": GIB // 4, **nothing}},
        "seconds": {**seconds, "latency": 0.005, "low": 0.01, "high": 0.02},
        "tokens_per_second": [pytest.approx(25600), pytest.approx(51200)],
    }
    half = dataclasses.replace(one, memory=dataclasses.replace(memory, parameters=GIB // 2))
    tables.print_plans({"model": one, "other": half})
    told = capsys.readouterr().err.splitlines()
    assert sum(line.endswith("compiled with xla_limit=49152, xla_offload=True") for line in told)
    lines = [re.split("  +", line) for line in told]
    shown = {line[0]: line[1:] for line in lines if len(line) == 4}
    assert shown.pop("") == ["model", "other", "ratio"]
    assert shown.pop("parameters") == ["1 GiB", "0.5 GiB", "2.000"]
    assert all(first == second and ratio == "1.000" for first, second, ratio in shown.values())
    assert {name: first for name, (first, *_) in shown.items()} == {
        **{"optimizer moments": "2 GiB", "state and batch, padded": "4 GiB"},
        **{"outputs beside the state": "1 MiB", "temporaries": "8 GiB", "program": "2 MiB"},
        **{"needed": "12.5 GiB", "there is": "16 GiB", "to and from memory": "5 GiB"},
        **{"all-gather": "3 GiB", "all-reduce": "1 GiB", "zeros in all-reduces": "0.5 GiB"},
        "of these, between slices or nodes": "0.25 GiB",
        "model, all devices": f"{flops.model / 1e12:.4g} TFLOP",
        "computed again backward": f"{flops.recomputed / 1e12:.4g} TFLOP",
        **{"compute": "1 ms", "attention kernels": "2 ms", "collectives waited for": "3 ms"},
        **{"their latency": "5 ms", "collectives overlapped": "4 ms"},
        **{"step, low": "10 ms", "step, high": "20 ms", "MFU, low": "25 %", "MFU, high": "50 %"},
    }
    assert tables.verdict(one) == (
        "fits: 12.50 GiB of 16.00 per device; 10 to 20 ms a step, 25.6k to 51.2k tokens/s, "
        "MFU 25 to 50%"
    )


def test_jax_must_be_told_to_take_most_of_a_gpu():
    one = Topology("h200:1", 1, jax.devices()[:1], "NVIDIA H200", "cpu")
    setup = one_setup()
    flops = step_flops(setup.model.config, 16)

    def remark(needed):
        memory = planning.DeviceMemory(1, 1, 1, 1, 1, 1, CHIPS["NVIDIA H200"].memory_bytes, needed)
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
