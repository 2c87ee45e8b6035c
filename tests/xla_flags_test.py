"""launch/xla_flags.py: what it prints, the installed jaxlib and libtpu take."""

import importlib.util
import os
import sys

import pytest
from helpers import ROOT, run_to_end

SCRIPT = ROOT / "launch" / "xla_flags.py"
specification = importlib.util.spec_from_file_location("xla_flags", SCRIPT)
xla_flags = importlib.util.module_from_spec(specification)
specification.loader.exec_module(xla_flags)
with_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed: the extra `tpu`"
)


def run_xla_flags(*kind, **given):
    mine = {k: v for k, v in os.environ.items() if "MEM_FRACTION" not in k and k != "XLA_FLAGS"}
    environment = {**mine, "JAX_PLATFORMS": "cpu"} | given
    return run_to_end([sys.executable, SCRIPT, *kind], env=environment)


def test_flags_that_jaxlib_does_not_know_are_left_out():
    """And the user's flags win over ours; the installed jaxlib knows all of these."""
    ended = run_xla_flags(
        "gpu",
        XLA_FLAGS="--xla_gone=1 --xla_gpu_all_reduce_combine_threshold_bytes=1",
        T5X_DIFFEQ_COMBINE_MIB="64",
        XLA_CLIENT_MEM_FRACTION="0.8",
    )
    (warning,) = ended.stderr.splitlines()
    assert "--xla_gone=1 is unknown to the installed jaxlib" in warning
    assert sorted(flag for flag in ended.stdout.split() if flag not in xla_flags.GPU) == [
        "--xla_gpu_all_gather_combine_threshold_bytes=67108864",
        "--xla_gpu_all_reduce_combine_threshold_bytes=1",
        "--xla_gpu_reduce_scatter_combine_threshold_bytes=67108864",
    ]
    assert set(xla_flags.GPU) <= set(ended.stdout.split())


def test_flags_that_cannot_be_read_are_not_fatal():
    ended = run_xla_flags(XLA_FLAGS="--xla_gpu_enable_pipelined_all_gather=perhaps")
    assert ended.stdout.split() == ["--xla_gpu_enable_pipelined_all_gather=perhaps"]
    assert ended.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        ("tpu", {"T5X_DIFFEQ_COMBINE_MIB": "64MB"}),
        ("gpu", {"XLA_CLIENT_MEM_FRACTION": "92"}),
        ("gpu", {"XLA_CLIENT_MEM_FRACTION": "0.9", "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.9"}),
    ],
)
def test_values_of_variables_that_cannot_be_used(kind, given):
    ended = run_xla_flags(kind, **given)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith("error: ")
    assert all(name in ended.stderr for name in given)


def test_a_kind_of_tpu_by_its_names():
    names = ("v5p-128", "v5litepod-16", "v6e", "tpu7x", "")
    assert [xla_flags.generation_of(name) for name in names] == ["v5p", "v5e", "v6e", "tpu7x", ""]


TOPOLOGIES = ("v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1")
SHARDED = """
import sys
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from t5x_diffeq.planner.topology import make_topology

mesh = Mesh(np.array(make_topology(sys.argv[1]).devices), ("fsdp",))
rows, columns = NamedSharding(mesh, P("fsdp")), NamedSharding(mesh, P(None, "fsdp"))
weights = jax.ShapeDtypeStruct((4, 1024, 1024), "float32", sharding=columns)
batch = jax.ShapeDtypeStruct((256, 1024), "float32", sharding=rows)

def loss(weights, batch):
    return (jax.lax.scan(lambda y, w: (jax.numpy.tanh(y @ w), None), batch, weights)[0] ** 2).mean()

shardings = NamedSharding(mesh, P()), columns
jax.jit(jax.value_and_grad(loss), out_shardings=shardings).lower(weights, batch).compile()
"""


@pytest.mark.slow
@with_libtpu
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_programs_compile_with_ours(topology):
    """A flag may be known, and refused when a sharded program is compiled for another kind."""
    ours = " ".join([*xla_flags.TPU, *xla_flags.GENERATIONS[topology.partition(":")[0]]])
    given = {**os.environ, "LIBTPU_INIT_ARGS": ours, "PYTHONPATH": str(ROOT), "XLA_FLAGS": ""}
    command = [sys.executable, "-c", SHARDED, topology]
    ended = run_to_end(command, env=given)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.slow
@with_libtpu
def test_the_installed_libtpu_knows_all_of_ours():
    """And what it doesn't know is left out."""
    ours = {*xla_flags.TPU, *(flag for of in xla_flags.GENERATIONS.values() for flag in of)}
    ours |= {f"{name}=1" for name in xla_flags.COMBINED["tpu"]}
    ended = run_xla_flags("tpu", "v5p", LIBTPU_INIT_ARGS=" ".join([*ours, "--xla_tpu_gone=1"]))
    assert set(ended.stdout.split()) == ours
    (warning,) = ended.stderr.splitlines()
    assert "--xla_tpu_gone=1 is unknown to the installed libtpu" in warning
