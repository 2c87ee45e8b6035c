"""The weight source that a config names.

time_dependent    W(t) = W0 + P e(t)             `time_dependent_weights`: the paper's
per_layer         weights per node of the grid   `stored_weights`: GPT, Llama
shared            one set of weights             `stored_weights`
"""

from typing import Any

from flax import linen as nn

from t5x_diffeq.config.config import ModelKeys
from t5x_diffeq.config.plugins import check_returns, load_plugin
from t5x_diffeq.model.ode.stored_weights import LayerWeights, SharedWeights
from t5x_diffeq.model.ode.time_dependent_weights import TimeDependentWeights
from t5x_diffeq.model.ode.weight_source import WeightSource
from t5x_diffeq.system.errors import InputError

SOURCES: dict[str, type[WeightSource]] = {
    "time_dependent": TimeDependentWeights,
    "per_layer": LayerWeights,
    "shared": SharedWeights,
}


class _NoBlock(nn.Module):
    """In place of a block, where a source is only asked about itself."""


def source_of(config: ModelKeys, **attributes: Any) -> WeightSource:
    """The source that `model.weights` names.

    Without a block it makes no weights, but says what it is: `source_of(config).any_time`.

    Args:
      config: the keys of `config.model`.
      attributes: those of `WeightSource`, and Linen's own.

    Raises:
      InputError: if an importable name doesn't stand for a source.
    """
    name = config.weights
    kind: Any = SOURCES.get(name)
    if kind is None:
        kind = load_plugin("model.weights", name)
        check_returns("model.weights", name, kind, WeightSource)
    given = {"block": _NoBlock(parent=None), "inputs": (), "parent": None, **attributes}
    try:
        source: WeightSource = kind(config=config, **given)
    except TypeError as error:
        raise InputError(f"model.weights={name} can't be made: {error}") from error
    return source
