"""Depth grown by copying: layers that begin as copies of the one layer that a single step trains.

    --config.model.weights='examples.depth.copied_layers:CopiedLayers(layers=12)'

A model of one step has a single layer W. With N > 1 steps, step n reads layer ceil(n K / N) of K
layers W + D_k, and every D_k is zero until such steps are trained. So with `train.depths=(1,)`
until a fraction of a training, depth grows from one layer to K copies of it, as in progressive
training (arXiv 2511.04981). Steps of 1/N keep what the single layer computes nearly unchanged. With
`NestedLayers` the other layers are untrained then.
"""

import jax
import jax.numpy as jnp
from flax import linen as nn

from t5x_diffeq.model.ode.sources import init_stacked
from t5x_diffeq.model.ode.weight_source import (
    WeightSource,
    block_parameters,
    cast_by_role,
    init_block,
)


class CopiedLayers(WeightSource):
    """W with one step, W + D_k of the layer k = ceil(t K) with several."""

    layers: int = 12  # K

    @nn.compact
    def __call__(self, times):
        """Each leaf `[nodes, ...]`."""

        def zeros(key):
            return jax.tree.map(
                jnp.zeros_like, init_stacked(self.block, self.inputs, self.layers, key)
            )

        shared = self.param("shared", lambda key: init_block(self.block, self.inputs, key))
        changes = self.param("changes", zeros)
        if len(times) == 1:
            chosen = jax.tree.map(lambda w: w[None], shared)
        else:
            # Rounding may put n / N a little above its layer's right end.
            layer = jnp.ceil(times * self.layers - 1e-3).astype(int) - 1
            layer = jnp.clip(layer, 0, self.layers - 1)
            chosen = jax.tree.map(lambda w, change: w + change[layer], shared, changes)
        return cast_by_role(chosen, block_parameters(self.block, self.inputs), self.dtype)

    @nn.nowrap
    def describe(self):
        """What it is, in a phrase."""
        return f"{self.layers} layers that begin as copies of one"
