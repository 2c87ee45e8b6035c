"""Weight sources outside the package, one of each kind, as a user would write them."""

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.traverse_util import unflatten_dict

import t5x_diffeq as td
from t5x_diffeq.model.layers.parameter import declare
from t5x_diffeq.model.ode.sources import init_stacked
from t5x_diffeq.model.ode.weight_source import OFFSET, block_parameters, cast_by_role, layer_name

# By kind: its importable name, a number of steps, and others that it can be trained at.
OWN = {
    "kernels": ("own_sources:KernelsOfTime", 3, (2, 3)),
    "all embeddings": ("own_sources:KernelsOfTime(every_layer=True)", 3, (2, 3)),
    "nested": ("examples.depth.nested_layers:NestedLayers(layers=3)", 3, (2, 3)),
    "looped": ("examples.depth.own_ends:OwnEnds(middle=1)", 4, ()),
    "first step": ("own_sources:FirstStep", 3, (2, 3)),
    "ends": ("examples.own_source:OwnEnds", 3, (2, 3)),
}


class LeavesOfTime(nn.Module):
    """The leaves of one layer: W0 + P e(t) for a kernel, and a constant for any other."""

    leaves: dict

    @nn.compact
    def __call__(self, e):
        """Each leaf at the nodes of e(t)."""
        return {name: self._make(name, leaf, e) for name, leaf in self.leaves.items()}

    def _make(self, name, leaf, e):
        shape, axes = leaf.value.shape, leaf.names
        if leaf.role != "kernel":
            whole = declare(
                self, name, nn.initializers.constant(OFFSET[leaf.role]), shape, axes, leaf.role
            )
            return jnp.broadcast_to(whole, (len(e), *shape))
        small = nn.initializers.normal(0.1)
        facts = {"role": "kernel", "fan_in": leaf.fan_in}
        P = declare(self, name, small, (e.shape[1], *shape), ("time_embed", *axes), **facts)
        W0 = declare(self, f"{name}_base", small, shape, axes, **facts)
        return W0 + jnp.tensordot(e, P, 1)


class KernelsOfTime(td.WeightSource):
    """W0 + P e(t) for kernels alone, with e(t) = (cos(pi t), cos(2 pi t))."""

    every_layer: bool = False  # whether it returns e(t) for the layers without a P, too

    def __call__(self, times):
        """The weights."""
        return self.with_embeddings(times)[0]

    @nn.compact
    def with_embeddings(self, times):
        """The weights, and the e(t) of layers."""
        e = jnp.cos(jnp.pi * jnp.outer(times, jnp.array([1.0, 2.0])))
        layers, made, embeddings = {}, {}, {}
        declared = block_parameters(self.block, self.inputs)
        for path, leaf in declared.items():
            layers.setdefault(path[:-1], {})[path[-1]] = leaf
        for path, leaves in layers.items():
            made[path] = LeavesOfTime(leaves, name=layer_name(path))(e)
            if self.every_layer or "kernel" in leaves:
                embeddings[layer_name(path)] = e
        return cast_by_role(unflatten_dict(made), declared, self.dtype), embeddings


class FirstStep(td.WeightSource):
    """One set of weights for the first step of a grid, another for all that follow."""

    @nn.compact
    def __call__(self, times):
        """The set of each time."""
        two = self.param("weights", lambda key: init_stacked(self.block, self.inputs, 2, key))
        later = (jnp.asarray(times) > 1.5 / self.config.num_steps).astype(int)
        picked = jax.tree.map(lambda w: w[later], two)
        return cast_by_role(picked, block_parameters(self.block, self.inputs), self.dtype)

    @nn.nowrap
    def is_smooth(self):
        """Yes: no time lies between the two."""
        return True
