"""The GPU's compiler, which needs no GPU, takes every kind of step, and no gradient travels whole.

`gpu_programs.py` compiles them, in an environment that has the compiler.
"""

import json
import os
import sysconfig
from importlib.metadata import version

import pytest
from environments import make_environment
from gpu_programs import CASES, NODES
from helpers import ROOT, run_to_end

from t5x_diffeq.planner.collectives import BETWEEN_SLICES
from t5x_diffeq.planner.topology import GPUS, TARGETS, make_topology
from t5x_diffeq.system.errors import InputError

pytestmark = pytest.mark.slow
KERNELS = {  # of attention, by case; the others have cuDNN's
    "documents, tensor, bfloat16 moments": {"__gpu$xla.gpu.triton"},
    "context, microbatches": set(),
    "decoding": set(),
}
CUDNN = {"__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"}


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """A Python with the GPU's compiler and cuDNN, and what the tests' own has."""
    folder = tmp_path_factory.mktemp("gpu") / "venv"
    python = make_environment(folder, f"jax[cuda13-local]=={version('jax')}", "nvidia-cudnn-cu13")
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "tests.pth").write_text(f"{sysconfig.get_path('purelib')}\n{ROOT}\n")
    return python


def run(python, *command):
    environment = {**os.environ, "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
    return run_to_end([python, *command], env=environment)


@pytest.mark.in_turns("images and compilers")
def test_every_kind_of_step_compiles(python, sample):
    """Each program has its kernels; over the network of two nodes go the gradient's shards alone,
    once for the ODE as for the baseline."""
    compared = ("ode", "baseline")
    cases = [*compared, *sample(case for case in CASES if case not in compared)]
    ended = run(python, "tests/support/gpu_programs.py", *cases)
    told = {line["case"]: line for line in map(json.loads, ended.stdout.splitlines())}
    assert [*told] == cases, ended.stderr[-2000:]
    for case, program in told.items():
        assert "error" not in program, (case, program["error"])
        found = {name for name in program["kernels"] if name.startswith(("__cudnn", "__gpu"))}
        assert found == KERNELS.get(case, CUDNN), case
    shards = told["baseline"]["gradient"]
    for case in compared:
        assert told[case]["mesh"]["data"] == NODES  # by default, across the nodes
        crossing = told[case]["between_nodes"]
        assert 0.5 * shards < crossing <= 1.1 * shards, (case, crossing, shards)


@pytest.mark.in_turns("whole programs")
def test_a_plan(python):
    keys = (
        "--config.model.embed_dim=64",
        "--config.model.num_heads=1",
        "--config.model.mlp_dim=64",
    )
    more = ("--config.model.num_steps=2", "--config.model.dtype=bfloat16")
    verb = ("-m", "t5x_diffeq.plan", "--config=configs/tiny.py", "--topology=h100:2x4")
    ended = run(python, *verb, *keys, *more, "--config.data.cross_documents=True")
    assert ended.returncode == 0, ended.stderr
    model, baseline = map(json.loads, ended.stdout.splitlines())
    for plan in (model, baseline):
        assert (plan["compiled_by"], plan["nodes"], plan["fits"]) == ("cuda", 2, True)
        assert (plan["mesh"]["data"], plan["mesh"]["fsdp"]) == (2, 4)
        assert plan["attention"] == "cudnn"
        assert plan["collectives"][BETWEEN_SLICES]["executions"] == 0
        total, crossing = (
            sum(kind["bytes"] for kind in plan[name].values())
            for name in ("collectives", "between_nodes")
        )
        assert 0 < crossing < total
        assert 0 < plan["seconds"]["low"] < plan["seconds"]["high"]
    assert "between slices or nodes" in ended.stderr and "of the low end" in ended.stderr


COMPILE_A_PRODUCT = """
import sys
import jax
from jax.sharding import SingleDeviceSharding
from t5x_diffeq.planner.topology import make_topology

for name in sys.argv[1:]:
    device = make_topology(f"{name}:1").devices[0]
    print(device.device_kind, device.compute_capability)
    on_device = SingleDeviceSharding(device)
    square = jax.ShapeDtypeStruct((64, 64), "bfloat16", sharding=on_device)
    jax.jit(lambda x: x @ x).lower(square).compile()
"""


def test_targets(python):
    """The compiler takes the description of each kind, and knows whose devices these are."""
    ended = run(python, "-c", COMPILE_A_PRODUCT, *GPUS)
    assert ended.returncode == 0, ended.stderr[-2000:]
    capabilities = {kind: ".".join(map(str, it.capability)) for kind, it in TARGETS.items()}
    assert ended.stdout.splitlines() == [f"{kind} {of}" for kind, of in capabilities.items()]


def test_bad_nodes():
    for name in ("h100:0", "h100:12", "h100:2x0", "h100:2x2x2"):
        with pytest.raises(InputError, match=f"--topology={name}: give a count of GPUs"):
            make_topology(name)
