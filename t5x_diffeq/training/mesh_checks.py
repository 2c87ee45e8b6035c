"""Checks that a mesh can share the sequences, the rows of a batch and the solver steps."""

from jax.sharding import Mesh

from t5x_diffeq.layers.mesh import STAGE
from t5x_diffeq.models.block import can_split_length
from t5x_diffeq.models.config import ModelConfig
from t5x_diffeq.models.sub_fields import make_block
from t5x_diffeq.runtime.config import Config, TrainKeys
from t5x_diffeq.runtime.errors import InputError
from t5x_diffeq.training import partitioning
from t5x_diffeq.training.depths import least_rows


def check_context(model: ModelConfig, mesh: Mesh) -> None:
    """Checks that sequences can be split over `mesh.context`.

    Raises:
      InputError: if they can't; names the block, or gives both numbers.
    """
    shards = mesh.shape["context"]
    if shards == 1:
        return
    if not can_split_length(type(make_block(model))):
        raise InputError(
            f"mesh.context={shards} splits sequences, and the block of model.block={model.block} "
            "needs whole ones (it doesn't say `splits_length = True`); set mesh.context=1"
        )
    if model.max_length % (2 * shards):
        raise InputError(
            f"data.sequence_length={model.max_length} is not divisible by {2 * shards}, the number "
            f"of chunks into which mesh.context={shards} cuts a sequence; change one of them"
        )


def check_microbatches(train: TrainKeys, mesh: Mesh) -> None:
    """Checks that every device's rows can be divided into the microbatches.

    Raises:
      InputError: if they can't; gives both numbers.
    """
    shards = partitioning.batch_shards(mesh.shape)
    where = f"on each of {shards} devices ({partitioning.describe_batch_axes(mesh.shape)})"
    if train.batch_size % (shards * train.microbatches):
        raise InputError(
            f"train.batch_size={train.batch_size} is not divisible by train.microbatches="
            f"{train.microbatches} {where}; change one of them"
        )
    every = _rows_of_depths(train)
    if train.batch_size % (shards * train.microbatches * every):
        raise InputError(
            f"train.batch_size={train.batch_size} is not divisible by {every} (train.depths_rows="
            f"{train.depths_rows}) in each of train.microbatches={train.microbatches} {where}; "
            "change one of them"
        )


def check_stages(config: Config, mesh: Mesh) -> None:
    """Checks that the stages of the mesh can share the solver steps and the rows of a batch.

    Raises:
      InputError: if they can't; gives both numbers.
    """
    model, train, stages = config.model, config.train, mesh.shape[STAGE]
    if stages == 1:
        return
    if mesh.shape["context"] > 1:
        raise InputError(
            f"mesh.stage={stages} and mesh.context={mesh.shape['context']}: a mesh splits the "
            "solver steps or the sequences, not both; set one of them to 1"
        )
    for key, steps in (("model.num_steps", model.num_steps), *_depths(train)):
        if steps % stages:
            raise InputError(
                f"{key}={steps} is not divisible by mesh.stage={stages}, each of which takes "
                "equally many solver steps; change one of them"
            )
    microbatches = partitioning.pipeline_microbatches(model.pipeline_microbatches, mesh.shape)
    if microbatches % stages:
        raise InputError(
            f"model.pipeline_microbatches={microbatches} is not divisible by mesh.stage={stages}; "
            f"set it to a multiple, or to None for {stages}"
        )
    rows = partitioning.batch_shards(mesh.shape) * train.microbatches * _rows_of_depths(train)
    if train.batch_size % (rows * microbatches):
        raise InputError(
            f"train.batch_size={train.batch_size} is not divisible by {rows * microbatches}: "
            f"{microbatches} microbatches of {stages} stages (model.pipeline_microbatches) on each "
            f"of {partitioning.batch_shards(mesh.shape)} devices "
            f"({partitioning.describe_batch_axes(mesh.shape)}), times train.microbatches="
            f"{train.microbatches}{_times_rows(train)}; change one of them"
        )


def _rows_of_depths(train: TrainKeys) -> int:
    """The number by which `train.depths_rows` divides the rows."""
    return least_rows(train.depths_rows, train.depths_per_step) if train.depths else 1


def _times_rows(train: TrainKeys) -> str:
    every = _rows_of_depths(train)
    return "" if every == 1 else f", times {every} (train.depths_rows={train.depths_rows})"


def _depths(train: TrainKeys) -> list[tuple[str, int]]:
    return [("an entry of train.depths", steps) for steps in train.depths]
