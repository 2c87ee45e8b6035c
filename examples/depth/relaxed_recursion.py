"""Relaxed recursion (arXiv 2410.20672): a few layers in a loop, with a low-rank change each time.

    --config.model.weights='examples.depth.relaxed_recursion:RelaxedRecursion(layers=2, rank=8)'

Step n reads layer n mod K of K layers, with A_n B_n of rank r added to each kernel, as in LoRA; B
begins at zero. The other leaves are the layer's own. The paper begins with the layers of a
pretrained model. With `layers=1` these are low-rank corrections of one shared layer.
"""

from math import prod

import jax.numpy as jnp
from flax import linen as nn
from flax.traverse_util import flatten_dict, unflatten_dict

from t5x_diffeq.model.layers.parameter import declare
from t5x_diffeq.model.ode.sources import init_stacked
from t5x_diffeq.model.ode.weight_source import (
    WeightSource,
    block_parameters,
    cast_by_role,
    layer_name,
)


class RelaxedRecursion(WeightSource):
    """K layers, each kernel of which has a low-rank change at each step."""

    layers: int = 2  # K
    rank: int = 8  # r
    any_time = False

    @nn.compact
    def __call__(self, times):
        """Each leaf `[nodes, ...]`."""
        count, r = len(times), self.rank
        stack = self.param(
            "weights", lambda key: init_stacked(self.block, self.inputs, self.layers, key)
        )
        declared = block_parameters(self.block, self.inputs)
        made = {}
        for path, leaf in flatten_dict(stack).items():
            made[path] = leaf[jnp.arange(count) % self.layers]
            if declared[path].role == "kernel":
                inputs = declared[path].fan_in
                outputs = prod(leaf.shape[1:]) // inputs
                low_rank = {"role": "kernel", "axes": ("steps", None, None)}
                name, a = layer_name(path), nn.initializers.normal(inputs**-0.5)
                A = declare(self, f"{name}.A", a, (count, inputs, r), fan_in=inputs, **low_rank)
                zeros, shape = nn.initializers.zeros, (count, r, outputs)
                B = declare(self, f"{name}.B", zeros, shape, fan_in=r, **low_rank)
                made[path] += (A @ B).reshape(count, *leaf.shape[1:])
        return cast_by_role(unflatten_dict(made), declared, self.dtype)

    @nn.nowrap
    def describe(self):
        """What it is, in a phrase."""
        return f"{self.layers} layers in a loop, with changes of rank {self.rank}"
