"""Initialisation from another run's model: its weights on the requested grid.

W(t) of a time-dependent or shared source is made at the grid's nodes and becomes layer weights;
layer weights, which exist only on their own grid, stay as they are.
"""

import copy
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from t5x_diffeq.array_types import Weights
from t5x_diffeq.models.config import ModelConfig
from t5x_diffeq.models.language_model import LanguageModel
from t5x_diffeq.ode.solvers import grid
from t5x_diffeq.runs.workdir import read_config
from t5x_diffeq.runtime.errors import InputError
from t5x_diffeq.runtime.files import AnyPath
from t5x_diffeq.training.checkpoint import restore_params
from t5x_diffeq.training.setup import Setup, make_setup
from t5x_diffeq.training.state import TrainState


@dataclass(frozen=True)
class Pretrained:
    """A trained run that another one starts from.

    Attributes:
      workdir: the run's workdir.
      config: the run's config.
      vocab_size: the vocabulary size of its tokenizer.
      checkpoint: the step of the checkpoint; None is the newest.
    """

    workdir: AnyPath
    config: ConfigDict
    vocab_size: int
    checkpoint: int | None = None

    @classmethod
    def of(cls, workdir: AnyPath, vocab_size: int, checkpoint: int | None = None) -> "Pretrained":
        """The run in `workdir`.

        Raises:
          InputError: if the workdir holds no run.
        """
        return cls(workdir, ConfigDict(read_config(workdir)), vocab_size, checkpoint)

    def params_for(self, setup: Setup, config: ConfigDict) -> tuple[dict, int]:
        """The run's parameters converted to the requested model, without adapters; and its step.

        Call within `setup.context`.

        Args:
          setup: the requested model's setup: per-layer weights, or the run's own kind on any grid.
          config: the requested model's config.

        Raises:
          InputError: if the run's weights can't be converted.
        """
        asked = setup.model.config
        self.check(asked)
        own = replace(self.model, num_steps=asked.num_steps, scheme=asked.scheme)
        here = copy.deepcopy(config)  # the devices and the batch of this run
        here.model = copy.deepcopy(self.config.model)
        here.model.update({"num_steps": own.num_steps, "scheme": own.scheme})
        here.train.trainable = ()
        trained = make_setup(here, self.vocab_size, setup.mesh.devices.flatten().tolist())
        params, step = restore_params(
            self.workdir,
            trained.abstract_state.params,
            self.checkpoint,
            self.config.train.verify_checkpoints,
        )
        if asked.weights == own.weights and not own.adapter_rank:
            return params, step
        shardings = jax.tree.map(
            lambda x: x.sharding, setup.abstract_state.params["source"]["weights"]
        )
        convert = jax.jit(partial(discretise, own), out_shardings=shardings)
        kept = {name: part for name, part in params.items() if name not in ("source", "adapters")}
        return {**kept, "source": {"weights": convert(params)}}, step

    @property
    def model(self) -> ModelConfig:
        """The run's model config, on its own grid."""
        keys = self.config.model.to_dict()
        return ModelConfig.of(keys, self.vocab_size, self.config.data.sequence_length)

    def check(self, asked: ModelConfig) -> None:
        """Checks that the run's weights can be converted to those of the requested model.

        Raises:
          InputError: if they can't.
        """
        own = self.model
        check_grid(own, asked)
        if asked.weights not in (own.weights, "per_layer"):
            raise InputError(
                f"model.weights={asked.weights} is asked for, and {self.workdir} holds a model of "
                f"{own.weights} weights, which has no such part; tune it by :lora or :full"
            )
        if asked.max_length != own.max_length and own.architecture == "gpt":
            raise InputError(
                f"data.sequence_length={asked.max_length}, and the positions of {self.workdir} "
                f"were learned for {own.max_length}; leave it at that"
            )


def check_grid(trained: ModelConfig, asked: ModelConfig) -> None:
    """Checks that the trained weights exist on the requested grid.

    Raises:
      InputError: if they are per-layer weights and the grid isn't their own.
    """
    own, other = (grid(c.scheme, c.num_steps) for c in (trained, asked))
    if trained.weights == "per_layer" and not np.array_equal(own, other):
        raise InputError(
            f"num_steps={asked.num_steps} with scheme {asked.scheme} reads weights at other times "
            f"than num_steps={trained.num_steps} with scheme {trained.scheme}, and this model has "
            "one set per layer: it runs on its own grid alone (time_dependent and shared on any)"
        )


def discretise(config: ModelConfig, params: dict) -> Weights:
    """The weights of a pass as parameters of `LayerWeights`: `[nodes, ...]` in float32.

    A hypernetwork makes its weights in the computation dtype, so that the model computes with the
    same numbers as before, bit for bit; merging adapters in float32 loses nothing.
    """
    exact = config if config.weights == "time_dependent" else config.in_float32()
    weights = LanguageModel(exact).apply({"params": params}, method="merged_weights")
    return jax.tree.map(lambda w: w.astype(jnp.float32), weights)


def begin(setup: Setup, config: ConfigDict, pretrained: Pretrained) -> tuple[TrainState, int]:
    """A new state with the run's parameters and freshly initialised adapters; and the run's step.

    Call within `setup.context`.
    """
    state = setup.init_state()
    params, step = pretrained.params_for(setup, config)
    return replace(state, params={**state.params, **params}), step
