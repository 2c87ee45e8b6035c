"""Nested depth: one stack of layers, of which fewer solver steps take every second, third, ...

    --config.model.weights='examples.depth.nested_layers:NestedLayers(layers=12)'

With N steps, step n = 1..N takes layer ceil(n K / N) of the K layers. It is the weight sharing of
LoopFormer (arXiv 2602.11451) and of networks that are trained at several depths, without
LoopFormer's conditioning on the step size. With `train.depths` it is the control for a W(t) that
works at many numbers of steps.
"""

import jax
import jax.numpy as jnp
from flax import linen as nn

from t5x_diffeq.model.ode.sources import init_stacked
from t5x_diffeq.model.ode.weight_source import WeightSource, block_parameters, cast_by_role


class NestedLayers(WeightSource):
    """W(t) of the layer ceil(t K), for any t in (0, 1]."""

    layers: int = 12  # K

    @nn.compact
    def __call__(self, times):
        """Each leaf `[nodes, ...]`."""
        stack = self.param(
            "weights", lambda key: init_stacked(self.block, self.inputs, self.layers, key)
        )
        # Rounding may put n / N a little above its layer's right end.
        layer = jnp.ceil(times * self.layers - 1e-3).astype(int) - 1
        chosen = jax.tree.map(lambda w: w[jnp.clip(layer, 0, self.layers - 1)], stack)
        return cast_by_role(chosen, block_parameters(self.block, self.inputs), self.dtype)

    @nn.nowrap
    def describe(self):
        """What it is, in a phrase."""
        return f"{self.layers} nested layers"
