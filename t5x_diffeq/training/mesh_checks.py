"""Checks that a mesh can share the sequences and the rows of a batch."""

from jax.sharding import Mesh

from t5x_diffeq.config.config import TrainKeys
from t5x_diffeq.model.block import can_split_length
from t5x_diffeq.model.config import ModelConfig
from t5x_diffeq.model.sub_fields import make_block
from t5x_diffeq.system.errors import InputError
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
    every = least_rows(train.depths_rows, train.depths_per_step) if train.depths else 1
    if train.batch_size % (shards * train.microbatches * every):
        raise InputError(
            f"train.batch_size={train.batch_size} is not divisible by {every} (train.depths_rows="
            f"{train.depths_rows}) in each of train.microbatches={train.microbatches} {where}; "
            "change one of them"
        )
