"""A trained run, loaded from its workdir, on its own grid or another."""

from dataclasses import dataclass
from math import gcd

import numpy as np
from ml_collections import ConfigDict

from t5x_diffeq.errors import InputError
from t5x_diffeq.files import AnyPath
from t5x_diffeq.models.config import ModelConfig
from t5x_diffeq.ode.solvers import grid
from t5x_diffeq.training.checkpoint import restore_params
from t5x_diffeq.training.setup import Setup, make_setup
from t5x_diffeq.training.workdir import read_config


@dataclass(frozen=True)
class Run:
    """A model with its trained parameters.

    Attributes:
      config: as run, but for the grid asked for.
      setup: on the devices of this process.
      params: the parameters, sharded.
      step: of the checkpoint.
    """

    config: ConfigDict
    setup: Setup
    params: dict
    step: int


def load_run(
    workdir: AnyPath,
    vocab_size: int,
    *,
    batch_size: int,
    num_steps: int | None = None,
    scheme: str | None = None,
    checkpoint: int | None = None,
) -> Run:
    """The run of `workdir`, on as many devices as `batch_size` can be divided by.

    Args:
      workdir: of the run.
      vocab_size: of its tokenizer.
      batch_size: sequences of a batch.
      num_steps: another number of steps; None is the trained one.
      scheme: another scheme; None is the trained one.
      checkpoint: step of the checkpoint; None is the newest.

    Raises:
      InputError: if the workdir holds no such run, or its weights no such grid.
    """
    config = ConfigDict(read_config(workdir))
    trained = ModelConfig.of(config.model.to_dict(), vocab_size, config.data.sequence_length)
    config.model.num_steps = trained.num_steps if num_steps is None else num_steps
    config.model.scheme = scheme or trained.scheme
    fsdp = gcd(config.model.embed_dim, batch_size)  # parameters are split as far as they can be
    config.mesh.update({"data": -1, "fsdp": fsdp, "tensor": 1})
    config.train.batch_size = batch_size
    setup = make_setup(config, vocab_size)
    check_grid(trained, setup.model.config)
    params, step = restore_params(workdir, setup.abstract_state.params, checkpoint)
    return Run(config, setup, params, step)


def check_grid(trained: ModelConfig, asked: ModelConfig) -> None:
    """The trained weights exist on the grid asked for.

    Raises:
      InputError: for per-layer weights off their own grid.
    """
    grids = [grid(c.scheme, c.num_steps) for c in (trained, asked)]
    if trained.weights == "per_layer" and not np.array_equal(*grids):
        raise InputError(
            f"num_steps={asked.num_steps} with scheme {asked.scheme} reads weights at other times "
            f"than num_steps={trained.num_steps} with scheme {trained.scheme}, and this model has "
            "one set per layer: it runs on its own grid alone (time_dependent and shared on any)"
        )
