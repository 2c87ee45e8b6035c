"""The weight source that a config names, and the two sources whose parameters are the weights.

time_dependent    W(t) = W0 + P e(t)                  `time_dependent_weights`: the paper's
per_layer         one set of weights per node of the grid: GPT, Llama; a discretised ODE
shared            one set for all times (Zhong et al. 2022; ALBERT)
"""

from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn

from t5x_diffeq.config.config import ModelKeys
from t5x_diffeq.config.plugins import make_plugin
from t5x_diffeq.model.layers.array_types import Times, Weights
from t5x_diffeq.model.layers.parameter import map_parameters
from t5x_diffeq.model.ode.time_dependent_weights import TimeDependentWeights
from t5x_diffeq.model.ode.weight_source import (
    WeightSource,
    block_parameters,
    cast_by_role,
    init_block,
)
from t5x_diffeq.system.errors import InputError


class LayerWeights(WeightSource):
    """One set of weights per node of the grid, each initialised as the block itself is."""

    any_time: ClassVar[bool] = False
    stored: ClassVar[bool] = True

    @nn.compact
    def __call__(self, times: Times) -> Weights:
        """The weights of all nodes; `times` must have one entry per node.

        Raises:
          InputError: if `times` has another length: layer weights have no W(t) off their grid.
        """
        if len(times) != self.num_nodes:
            raise InputError(
                f"per-layer weights exist only at their own {self.num_nodes} nodes, not at "
                f"{len(times)}; only time-dependent and shared weights can change the grid"
            )
        init = partial(init_stacked, self.block, self.inputs, self.num_nodes)
        stacked = self.param("weights", init)
        return cast_by_role(stacked, block_parameters(self.block, self.inputs), self.dtype)

    @nn.nowrap
    def describe(self) -> str:
        """A phrase for the account of a run."""
        return "one set of weights per layer"


class SharedWeights(WeightSource):
    """One set of weights for all times."""

    constant: ClassVar[bool] = True
    stored: ClassVar[bool] = True

    @nn.compact
    def __call__(self, times: Times) -> Weights:
        """The same weights at each of `times`."""
        weights = self.param("weights", lambda key: init_block(self.block, self.inputs, key))
        # Repeated before rounding, so that the gradient is summed over the times in float32.
        repeated = jax.tree.map(lambda w: jnp.broadcast_to(w, (len(times), *w.shape)), weights)
        return cast_by_role(repeated, block_parameters(self.block, self.inputs), self.dtype)

    @nn.nowrap
    def describe(self) -> str:
        """A phrase for the account of a run."""
        return "one set of weights for all steps"


def init_stacked(block: nn.Module, inputs: tuple, count: int, key: jax.Array) -> Weights:
    """`count` independent initialisations of the block, stacked on a leading axis `steps`."""
    init = jax.vmap(lambda key: init_block(block, inputs, key))
    return map_parameters(
        lambda leaf: leaf.replace(names=("steps", *leaf.names)), init(jax.random.split(key, count))
    )


SOURCES: dict[str, type[WeightSource]] = {
    "time_dependent": TimeDependentWeights,
    "per_layer": LayerWeights,
    "shared": SharedWeights,
}


class _NoBlock(nn.Module):
    """Stands in for the block of a source that is only asked about itself."""


def source_of(config: ModelKeys, **attributes: Any) -> WeightSource:
    """The source that `model.weights` names.

    Without a block it makes no weights, but says what it is: `source_of(config).any_time`.

    Raises:
      InputError: if an importable name doesn't name a source, or its arguments don't fit.
    """
    made = {"block": _NoBlock(parent=None), "inputs": (), "parent": None, **attributes}
    if kind := SOURCES.get(config.weights):
        return kind(config=config, **made)
    return make_plugin("model.weights", config.weights, WeightSource, config=config, **made)
