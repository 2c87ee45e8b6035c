"""A loop between a first and a last layer of their own (as in Hyperloop, arXiv 2604.21254).

    --config.model.weights='examples.depth.own_ends:OwnEnds(middle=2)'

The steps are the first layer, K middle layers again and again, and the last layer, so
num_steps = 2 + K loops. Hyperloop's connections between loops are left out: combine this with
`hyper_connections`.
"""

import jax
import jax.numpy as jnp
from flax import linen as nn

from t5x_diffeq.model.ode.sources import init_stacked
from t5x_diffeq.model.ode.weight_source import WeightSource, block_parameters, cast_by_role
from t5x_diffeq.system.errors import InputError


class OwnEnds(WeightSource):
    """K + 2 layers, of which the K in the middle are read in turn until the last step."""

    middle: int = 2  # K
    any_time = False

    @nn.compact
    def __call__(self, times):
        """Each leaf `[nodes, ...]`."""
        loops, rest = divmod(len(times) - 2, self.middle)
        if loops < 1 or rest:
            raise InputError(
                f"model.num_steps={len(times)}: OwnEnds(middle={self.middle}) has 2 steps more "
                f"than a multiple of {self.middle}; change one of them"
            )
        stack = self.param(
            "weights", lambda key: init_stacked(self.block, self.inputs, self.middle + 2, key)
        )
        order = jnp.array([0, *[*range(1, self.middle + 1)] * loops, self.middle + 1])
        read = jax.tree.map(lambda w: w[order], stack)
        return cast_by_role(read, block_parameters(self.block, self.inputs), self.dtype)

    @nn.nowrap
    def describe(self):
        """What it is, in a phrase."""
        return f"{self.middle} layers in a loop between a first and a last one"
