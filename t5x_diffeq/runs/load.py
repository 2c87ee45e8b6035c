"""A trained run, loaded from its workdir, on its own grid or another."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd

from t5x_diffeq.checkpoints.trained_params import restore_params
from t5x_diffeq.models.sub_fields import need_methods
from t5x_diffeq.runs.adapter_files import load_adapters, read_adapter_facts
from t5x_diffeq.runs.pretrained import PretrainedRun
from t5x_diffeq.runtime.console import Progress
from t5x_diffeq.runtime.errors import InputError
from t5x_diffeq.runtime.files import AnyPath
from t5x_diffeq.training.partitioning import make_mesh
from t5x_diffeq.training.placed_model import PlacedModel, place_model

Grid = tuple[int | None, str | None]  # number of solver steps and scheme; None: the run's own


@dataclass(frozen=True)
class Run:
    """A model with its trained parameters.

    Attributes:
      placed: the model on this process's devices.
      params: the parameters, sharded.
      step: the checkpoint's step.
    """

    placed: PlacedModel
    params: dict
    step: int

    def at_depth(self, num_steps: int | None, scheme: str | None = None) -> "Run":
        """The same run, with the same parameters, on another grid; see `ModelConfig.at_depth`."""
        return replace(self, placed=self.placed.at_depth(num_steps, scheme))


def load_run(
    workdir: AnyPath,
    vocab_size: int,
    *,
    batch_size: int,
    checkpoint: int | str | None = None,
    grids: Sequence[Grid] = (),
    methods: tuple[str, ...] = (),
    adapters: AnyPath | None = None,
    averages: bool = False,
) -> Run:
    """The run in `workdir`, on its own grid and as many devices as divide `batch_size`.

    Args:
      workdir: the run's workdir.
      vocab_size: the vocabulary size of its tokenizer.
      batch_size: sequences in a batch.
      checkpoint: the step of the checkpoint, or "best"; None is the newest.
      grids: the grids that the run is wanted on; one that it doesn't exist on is refused before the
        checkpoint is read.
      methods: the methods of its block that are needed, which are looked for before that, too.
      adapters: the folder of adapters that another run trained on this one's weights.
      averages: take the moving averages of the parameters (train.ema_decay).

    Raises:
      InputError: if the workdir holds no such run, its weights don't exist on one of the grids, its
        block lacks a method, the adapters aren't of its weights, or there are no averages.
    """
    if adapters and averages:
        raise InputError("--averages doesn't go with --adapters, which are of the last weights")
    run = PretrainedRun(workdir, vocab_size, checkpoint)
    of_adapters = read_adapter_facts(adapters).model if adapters else {}
    config = run.config.with_values(
        {
            **{f"model.{key}": value for key, value in of_adapters.items()},
            **dict.fromkeys(("mesh.stage", "mesh.expert", "mesh.context", "mesh.tensor"), 1),
            "mesh.data": -1,
            "mesh.fsdp": gcd(run.config.model.embed_dim, batch_size),  # as far as possible
        }
    )
    placed = place_model(config, vocab_size, make_mesh(config.mesh, batch_size))
    need_methods(placed.model.config, methods)
    for num_steps, scheme in grids:
        placed.at_depth(num_steps, scheme)
    if adapters:
        with placed.context():
            params, step = run.params_for(placed)
            params = load_adapters(adapters, params, placed.abstract_params)
        return Run(placed, params, step)
    with Progress("reading the checkpoint"):
        verify = config.train.verify_checkpoints
        params, step = restore_params(workdir, placed.abstract_params, checkpoint, verify, averages)
    return Run(placed, params, step)
