"""Checks that the values of a config are compatible; they need no mesh and no model."""

from t5x_diffeq.config.config import Config
from t5x_diffeq.config.plugins import is_plugin
from t5x_diffeq.model.ode.sources import source_of
from t5x_diffeq.system.errors import InputError


def check_new(config: Config) -> None:
    """Checks that the keys of a new run don't contradict each other.

    Runs that began before this check existed may continue.

    Raises:
      InputError: if they do; gives both values.
    """
    model = config.model
    if (model.scan_unroll or 1) > model.num_steps:
        raise InputError(
            f"model.scan_unroll={model.scan_unroll} is more than model.num_steps="
            f"{model.num_steps}; give at most {model.num_steps}"
        )
    if model.adapter_rank > model.embed_dim:
        raise InputError(
            f"model.adapter_rank={model.adapter_rank} is more than model.embed_dim="
            f"{model.embed_dim}, the rank that a kernel can have; lower it"
        )
    _check_moments(config)


def _check_moments(config: Config) -> None:
    """Checks that `optimizer.moments` applies to parameters that train."""
    trainable = config.train.trainable
    if config.optimizer.moments != "int8" or is_plugin(config.optimizer.name):
        return
    if source_of(config.model).constant:
        raise InputError(
            "optimizer.moments=int8 is for weights of several times or layers, and "
            f"model.weights={config.model.weights} is one set; take bfloat16"
        )
    if trainable and "source" not in trainable:
        raise InputError(
            f"optimizer.moments=int8 is for the kernels of the source, and train.trainable="
            f"{trainable} leaves it out; take bfloat16"
        )
