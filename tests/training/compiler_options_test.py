"""The options of the compiled step: one table, which every kind's compiler takes."""

import importlib.util
import json
import os
import sys
from types import SimpleNamespace

import jax
import pytest
from helpers import ROOT, run_to_end

from t5x_diffeq.training import compiler_options
from t5x_diffeq.training.compiler_options import step_options

VMEM = "xla_tpu_scoped_vmem_limit_kib"
SPARSE_CORE = "xla_tpu_enable_sparse_core_collective_offload_all_gather"
with_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed: the extra `tpu`"
)


@pytest.fixture
def options_of(monkeypatch):
    """The options for devices of a kind whose compiler takes all options."""
    monkeypatch.setattr(compiler_options, "_known", lambda device, options: dict(options))

    def options(kind, **environment):
        device = SimpleNamespace(device_kind=kind, platform=kind.split()[0].lower()[:3])
        if kind.startswith("NVIDIA"):
            device.platform = "gpu"
        return step_options(device, environment)

    return options


@pytest.mark.parametrize(
    ("kind", "mib", "sparse_core"),
    [
        ("TPU v4", None, None),
        ("TPU v5 lite", 48, None),
        ("TPU v5", 48, True),
        ("TPU v6 lite", 48, True),
        ("TPU7x", 48, True),
        ("an unknown kind", None, None),
    ],
)
def test_each_kind_of_tpu_has_its_own(options_of, kind, mib, sparse_core):
    options = options_of(kind)
    assert options.get(VMEM) == (mib and mib * 1024)
    assert options.get(SPARSE_CORE) == sparse_core


def test_the_user_has_the_last_word(options_of):
    """By flags, and by one variable that turns SparseCore off."""
    assert VMEM not in options_of("TPU v5", LIBTPU_INIT_ARGS=f"--{VMEM}=32768")
    off = options_of("TPU7x", T5X_DIFFEQ_SPARSE_CORE="0")  # which has it on without a flag
    assert list(off.values()) == [48 * 1024, *[False] * 5]
    assert "sparse" not in str(options_of("TPU v4", T5X_DIFFEQ_SPARSE_CORE="0"))
    assert options_of("NVIDIA H100 80GB HBM3") == {}
    flag = "--xla_gpu_all_reduce_combine_threshold_bytes=1"
    combined = options_of("NVIDIA B200", T5X_DIFFEQ_COMBINE_MIB="64", XLA_FLAGS=flag)
    assert len(combined) == 2 and "xla_gpu_all_reduce_combine_threshold_bytes" not in combined


@pytest.mark.parametrize(
    ("kind", "thresholds"), [("TPU v4", 1), ("NVIDIA B200", 3), ("NVIDIA H100 80GB HBM3", 3)]
)
def test_collectives_are_combined_up_to_a_size(options_of, kind, thresholds):
    before = options_of(kind)
    combined = options_of(kind, T5X_DIFFEQ_COMBINE_MIB="64")
    assert list(combined.values()) == [*before.values(), *[64 * 2**20] * thresholds]
    assert options_of(kind) == before


def test_what_the_compiler_does_not_know_is_left_out(capsys):
    given = (("xla_gone", 1), ("xla_cpu_copy_insertion_use_region_analysis", True), ("xla_too", 2))
    with jax.set_mesh(jax.make_mesh((8,), ("fsdp",))):  # where a step is compiled
        assert compiler_options._known(jax.devices()[0], given) == dict([given[1]])
    first, second = capsys.readouterr().err.splitlines()
    assert "xla_gone is unknown to the installed compiler, and left out" in first
    assert "xla_too is unknown" in second


TOPOLOGIES = ("v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1")
SHARDED = """
import json
import sys
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from t5x_diffeq.planner.collectives import collectives, traffic
from t5x_diffeq.planner.topology import make_topology
from t5x_diffeq.training.compiler_options import step_options

mesh = Mesh(np.array(make_topology(sys.argv[1]).devices), ("fsdp",))
rows, columns = NamedSharding(mesh, P("fsdp")), NamedSharding(mesh, P(None, "fsdp"))
weights = jax.ShapeDtypeStruct((4, 1024, 1024), "float32", sharding=columns)
batch = jax.ShapeDtypeStruct((1024, 1024), "float32", sharding=rows)

def loss(weights, batch):
    return (jax.lax.scan(lambda y, w: (jax.numpy.tanh(y @ w), None), batch, weights)[0] ** 2).mean()

shardings = NamedSharding(mesh, P()), columns
options = step_options(mesh.devices.flat[0])
step = jax.jit(jax.value_and_grad(loss), out_shardings=shardings, compiler_options=options)
moved = traffic(collectives(step.lower(weights, batch).compile().as_text()))
print(json.dumps([options, moved["all-gather"].executions, moved["all-gather"].synchronous]))
"""


@pytest.mark.slow
@with_libtpu
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_programs_compile_with_ours(topology):
    """An option may be known, and refused when a sharded program is compiled for another kind."""
    given = {**os.environ, "PYTHONPATH": str(ROOT), "XLA_FLAGS": "", "LIBTPU_INIT_ARGS": ""}
    ended = run_to_end([sys.executable, "-c", SHARDED, topology], env=given)
    assert ended.returncode == 0 and "warning" not in ended.stderr, ended.stderr
    options, gathers, synchronous = json.loads(ended.stdout)
    assert gathers and (synchronous == 0) == (options.keys() != {VMEM})
