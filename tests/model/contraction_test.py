"""W0 + P e(t): its value and gradient, and what the TPU's compiler makes of it and an update."""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import auto_mesh, rules_of
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from configs import default
from t5x_diffeq.model.ode.contraction import contract
from t5x_diffeq.planner.hlo import read_program, shapes
from t5x_diffeq.planner.topology import make_topology
from t5x_diffeq.planner.trip_count import executions
from t5x_diffeq.training.partitioning import AXES, mesh_context

RULES = (("embed", "fsdp"), ("mlp", "tensor"))
LIBTPU = importlib.util.find_spec("libtpu") is not None
N, T, KERNEL, AXIS_NAMES = 16, 32, (512, 1024), ("embed", "mlp")
BYTES = 4 * T * 128 * 1024  # of P, on each of four devices


@pytest.mark.parametrize("sizes", [None, {"data": 1, "fsdp": 2, "tensor": 2}])
@pytest.mark.parametrize("has_W0", [True, False])
def test_value_and_gradient(sizes, has_W0):
    """Those of the formula, on one device and on shards of P."""
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = (5, 3), (3, 8, 6), (8, 6), (5, 8, 6)
    e, P, W0, dW = (jax.random.normal(*each) for each in zip(keys, shapes, strict=True))
    inputs = (e, P, W0) if has_W0 else (e, P)

    def plain(e, P, W0=0):
        return W0 + jnp.einsum("nt,tio->nio", e, P)

    def ours(e, P, W0=None):
        return contract(e, P, AXIS_NAMES, jnp.float32, W0)

    def value_and_gradient(function):
        W, pull_back = jax.vjp(function, *inputs)
        return W, pull_back(dW)

    expected = value_and_gradient(plain)
    if sizes is None:
        result = value_and_gradient(ours)
    else:
        with mesh_context(auto_mesh(**sizes), RULES):
            result = jax.jit(lambda: value_and_gradient(ours))()
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), result, expected)


def update(e, P, m, v, dW):
    """W, and P and two moments updated as by Adam."""
    W, pull_back = jax.vjp(lambda e, P: contract(e, P, AXIS_NAMES, jnp.bfloat16), e, P)
    de, dP = pull_back(dW)
    m, v = 0.9 * m + dP, 0.99 * v + dP**2
    return W, de, P - m / jnp.sqrt(v + 1e-8), m, v


@pytest.mark.slow
@pytest.mark.skipif(not LIBTPU, reason="needs libtpu: pip install -e '.[tpu]'")
def test_a_tpu_copies_neither_p_nor_its_moments():
    """Nothing but products and the update itself touches what is as large as P."""
    devices = np.array(make_topology("v5e:2x2").devices).reshape(
        [4 if axis == "fsdp" else 1 for axis in AXES]
    )
    mesh = Mesh(devices, AXES, axis_types=(jax.sharding.AxisType.Auto,) * len(AXES))
    whole = NamedSharding(mesh, PartitionSpec())
    parts = NamedSharding(mesh, PartitionSpec(None, "fsdp", None))
    of_P = jax.ShapeDtypeStruct((T, *KERNEL), jnp.float32, sharding=parts)
    e = jax.ShapeDtypeStruct((N, T), jnp.float32, sharding=whole)
    dW = jax.ShapeDtypeStruct((N, *KERNEL), jnp.bfloat16, sharding=parts)
    shardings = (parts, whole, parts, parts, parts)
    with mesh_context(mesh, rules_of(default.get_config())):
        step = jax.jit(update, donate_argnums=(1, 2, 3), out_shardings=shardings)
        program = read_program(step.lower(e, of_P, of_P, of_P, dW).compile().as_text())
    copies = [
        it.name
        for it, _, _, fused in executions(program)
        if not fused and it.opcode == "copy" and sum(x.bytes for x in shapes(it.type)) >= BYTES / 2
    ]
    assert copies == []
