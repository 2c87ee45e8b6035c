"""The weight sources, on a block that they have never seen."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from helpers import auto_mesh

from t5x_diffeq.config.config import ModelKeys
from t5x_diffeq.model.layers.linear import Linear
from t5x_diffeq.model.layers.norm import Norm
from t5x_diffeq.model.layers.parameter import declare
from t5x_diffeq.model.ode.sources import LayerWeights
from t5x_diffeq.model.ode.time_dependent_weights import TimeDependentWeights
from t5x_diffeq.system.errors import InputError
from t5x_diffeq.training.partitioning import mesh_context, unbox

INPUTS = (jax.ShapeDtypeStruct((1, 1, 8), jnp.float32),)
TIMES = jnp.array([0.25, 0.5, 1.0])
KEYS = ModelKeys(init="invariant", time_embed_dim=5, num_frequencies=3)


class OddBlock(nn.Module):
    """A block of another architecture: one norm, one linear with a two-axis output."""

    @nn.compact
    def __call__(self, y):
        y = Norm(centred=True, use_shift=True, epsilon=1e-5, name="norm")(y)
        linear = Linear((8, 2, 6), ("embed", "heads", "mlp"), use_bias=True, name="linear")
        return linear(y)


class UndeclaredBlock(nn.Module):
    @nn.compact
    def __call__(self, y):
        return nn.Dense(4)(y)


class TableBlock(nn.Module):
    @nn.compact
    def __call__(self, y):
        declare(self, "table", nn.initializers.ones, (4,), (None,), "embedding")
        return y


def random_params(source, key=0):
    declared = source.init(jax.random.key(key), TIMES)["params"]
    leaves, tree = jax.tree.flatten(unbox(declared))
    rng = np.random.default_rng(key)
    return tree.unflatten([jnp.asarray(0.1 * rng.normal(size=x.shape), x.dtype) for x in leaves])


@pytest.mark.parametrize("block", [UndeclaredBlock(), TableBlock()])
def test_a_leaf_of_unknown_role_is_an_error(block):
    with pytest.raises(InputError, match=r"is of the role .*; the roles are kernel, bias"):
        TimeDependentWeights(block, INPUTS, KEYS).init(jax.random.key(0), TIMES)


def test_layer_weights_are_independent_and_bound_to_their_grid():
    source = LayerWeights(OddBlock(), INPUTS, KEYS, num_nodes=3)
    variables = source.init(jax.random.key(0), TIMES)
    kernel = variables["params"]["weights"]["linear"]["kernel"]
    assert kernel.names == ("steps", "embed", "heads", "mlp")
    assert not np.allclose(kernel.value[0], kernel.value[1])
    with pytest.raises(InputError, match="own 3 nodes, not at 2"):
        source.apply(variables, TIMES[:2])


@pytest.mark.slow
def test_weights_in_compute_dtype_norms_in_float32():
    source = TimeDependentWeights(OddBlock(), INPUTS, KEYS, dtype=jnp.bfloat16)
    dtypes = jax.tree.map(lambda w: w.dtype, source.apply({"params": random_params(source)}, TIMES))
    assert dtypes["linear"] == {"kernel": jnp.bfloat16, "bias": jnp.bfloat16}
    assert dtypes["norm"] == {"scale": jnp.float32, "shift": jnp.float32}


def collectives(compiled):
    """Result types of the collective operations in the compiled text, by kind."""
    kinds = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
    return re.findall(rf"= (.*?) ({kinds})(?:-start)?\(", compiled.as_text())


@pytest.mark.slow
def test_sharded_generation_equals_whole_and_moves_only_embeddings():
    source = TimeDependentWeights(OddBlock(), INPUTS, KEYS)
    params = random_params(source)
    mesh = auto_mesh(fsdp=2, tensor=2)
    rules = (("embed", "fsdp"), ("heads", "tensor"), ("mlp", None), ("time_embed", None))
    names = nn.get_partition_spec(source.init(jax.random.key(0), TIMES))["params"]
    shardings = nn.logical_to_mesh_sharding(names, mesh, rules)

    def generate(params):
        return source.apply({"params": params}, TIMES)

    def gradient(params, like):
        products = jax.tree.map(lambda w, v: (w * v).sum(), generate(params), like)
        return sum(jax.tree.leaves(products))

    whole = generate(params)
    like = jax.tree.map(lambda w: jnp.sin(jnp.arange(w.size)).reshape(w.shape), whole)
    expected = jax.grad(gradient)(params, like)
    with mesh_context(mesh, rules):
        placed = jax.device_put(params, shardings)
        forward = jax.jit(generate).lower(placed).compile()
        weights = forward(placed)
        laid_out = jax.device_put(like, jax.tree.map(lambda w: w.sharding, weights))
        backward = jax.jit(jax.grad(gradient), out_shardings=shardings)
        backward = backward.lower(placed, laid_out).compile()
        found = backward(placed, laid_out)
    assert tuple(weights["linear"]["kernel"].sharding.spec)[:3] == (None, "fsdp", "tensor")
    assert collectives(forward) == []
    # Backward, the [N, T] sums for e(t) alone: one per leaf.
    assert {kind for _, kind in collectives(backward)} == {"all-reduce"}
    assert all("f32[3,5]" in result for result, _ in collectives(backward))
    for a, b in zip(*map(jax.tree.leaves, ((weights, found), (whole, expected))), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * max(1, float(jnp.abs(b).max())))
