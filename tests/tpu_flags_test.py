"""launch/xla_flags.py tpu: LIBTPU_INIT_ARGS, against the real libtpu where it is installed."""

import importlib.util
import os
import subprocess
import sys

import pytest
from helpers import ROOT

KINDS = ("v4", "v5e", "v5p", "v6e", "tpu7x")
SAID = """ERROR: Unknown command line flag 'xla_tpu_gone'. Did you mean: xla_tpu_log_flags ?
ERROR: Unknown command line flag 'xla_tpu_lost'
"""  # of libtpu 0.0.50
with_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed: the extra `tpu`"
)


@pytest.fixture
def xla_flags():
    path = ROOT / "launch" / "xla_flags.py"
    spec = importlib.util.spec_from_file_location("xla_flags", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_kind_by_its_names(xla_flags):
    names = ("v5p-128", "v5litepod-16", "v6e", "tpu7x", "")
    assert [xla_flags.generation_of(name) for name in names] == ["v5p", "v5e", "v6e", "tpu7x", ""]


def test_what_libtpu_does_not_know_is_left_out(xla_flags, capsys):
    flags = ["--xla_tpu_gone=1", "--xla_tpu_kept=gone", "--xla_tpu_lost"]

    def ask_libtpu(flags):
        return SAID if "--xla_tpu_gone=1" in flags else ""

    assert xla_flags.select_known(flags, flags, ask_libtpu) == ["--xla_tpu_kept=gone"]
    assert capsys.readouterr().err.count("is unknown to the installed libtpu") == 2


def test_what_the_user_sets_wins(xla_flags, monkeypatch, capsys):
    monkeypatch.setattr(xla_flags, "ask_libtpu", ask_libtpu := lambda flags: "")
    ask_libtpu.__name__ = "ask_libtpu"
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_tpu_scoped_vmem_limit_kib=1")
    xla_flags.main("tpu", "v6e-16")
    printed = capsys.readouterr().out.split()
    assert printed[-1] == "--xla_tpu_scoped_vmem_limit_kib=1"
    assert sum("scoped_vmem" in flag for flag in printed) == 1


TOPOLOGIES = {
    "v4": "v4:2x2x1",
    "v5e": "v5e:2x2",
    "v5p": "v5p:2x2x1",
    "v6e": "v6e:2x2",
    "tpu7x": "tpu7x:2x2x1",
}
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
@pytest.mark.parametrize("kind", KINDS)
def test_programs_compile_with_ours(xla_flags, kind):
    """A flag may be known, and refused when a sharded program is compiled for another kind."""
    ours = " ".join([*xla_flags.TPU, *xla_flags.GENERATIONS[kind]])
    given = {**os.environ, "LIBTPU_INIT_ARGS": ours, "PYTHONPATH": str(ROOT), "XLA_FLAGS": ""}
    command = [sys.executable, "-c", SHARDED, TOPOLOGIES[kind]]
    ended = subprocess.run(command, env=given, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.slow
@with_libtpu
def test_the_installed_libtpu_knows_all_of_ours(xla_flags):
    ours = {*xla_flags.TPU, *(flag for kind in KINDS for flag in xla_flags.GENERATIONS[kind])}
    ours |= {f"{name}=1" for name in xla_flags.COMBINED["tpu"]}
    given = {**os.environ, "LIBTPU_INIT_ARGS": " ".join([*sorted(ours), "--xla_tpu_gone=1"])}
    command = [sys.executable, ROOT / "launch" / "xla_flags.py", "tpu", "v5p"]
    ended = subprocess.run(command, env=given, capture_output=True, text=True, check=True)
    assert set(ended.stdout.split()) == ours
    assert (
        ended.stderr
        == "warning: --xla_tpu_gone=1 is unknown to the installed libtpu, and left out\n"
    )
