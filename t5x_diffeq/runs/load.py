"""A trained run, loaded from its workdir, on its own grid or another."""

import copy
from dataclasses import dataclass
from math import gcd

from ml_collections import ConfigDict

from t5x_diffeq.runs.adapter_files import load_adapters, read_facts
from t5x_diffeq.runs.pretrained import Pretrained
from t5x_diffeq.runtime.console import Progress
from t5x_diffeq.runtime.errors import InputError
from t5x_diffeq.runtime.files import AnyPath
from t5x_diffeq.training.checkpoint import restore_params
from t5x_diffeq.training.setup import Setup, make_setup


@dataclass(frozen=True)
class Run:
    """A model with its trained parameters.

    Attributes:
      config: the config of the run, with the requested grid.
      setup: the setup on this process's devices.
      params: the parameters, sharded.
      step: the checkpoint's step.
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
    adapters: AnyPath | None = None,
) -> Run:
    """The run in `workdir`, on as many devices as divide `batch_size`.

    Args:
      workdir: the run's workdir.
      vocab_size: the vocabulary size of its tokenizer.
      batch_size: sequences in a batch.
      num_steps: another number of solver steps; None is the trained one.
      scheme: another scheme; None is the trained one.
      checkpoint: the step of the checkpoint; None is the newest.
      adapters: the folder of adapters that another run trained on this one's weights.

    Raises:
      InputError: if the workdir holds no such run, or its weights don't exist on the grid.
    """
    pretrained = Pretrained.of(workdir, vocab_size, checkpoint)
    config = copy.deepcopy(pretrained.config)
    if adapters:
        config.model.update(read_facts(adapters).model)
        check_same_grid(config, adapters, num_steps, scheme)
    config.model.num_steps = config.model.num_steps if num_steps is None else num_steps
    config.model.scheme = scheme or config.model.scheme
    fsdp = gcd(config.model.embed_dim, batch_size)  # parameters are sharded as far as possible
    config.train.trainable = ()
    config.mesh.update({"data": -1, "fsdp": fsdp, "tensor": 1})
    config.train.batch_size = batch_size
    setup = make_setup(config, vocab_size)
    pretrained.check(setup.model.config)
    if not adapters:
        with Progress("reading the checkpoint"):
            params, step = restore_params(
                workdir, setup.abstract_state.params, checkpoint, config.train.verify_checkpoints
            )
        return Run(config, setup, params, step)
    with setup.context():
        params, step = pretrained.params_for(setup, config)
        params = load_adapters(adapters, params, setup.abstract_state.params)
    return Run(config, setup, params, step)


def check_same_grid(
    config: ConfigDict, adapters: AnyPath, num_steps: int | None, scheme: str | None
) -> None:
    """Checks that adapters are requested on their own grid.

    Raises:
      InputError: if the number of steps or the scheme is another one.
    """
    own = config.model.num_steps, config.model.scheme
    if (num_steps or own[0], scheme or own[1]) != own:
        raise InputError(
            f"--adapters={adapters} were trained for num_steps={own[0]} with scheme {own[1]}, and "
            "exist there alone; leave --num_steps and --scheme out"
        )
