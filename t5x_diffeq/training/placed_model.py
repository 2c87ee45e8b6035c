"""A model on a mesh of devices: what evaluation, inference, analysis and export need."""

from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from math import log2, prod
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from t5x_diffeq.config.config import Config, TrainKeys
from t5x_diffeq.config.plugins import is_plugin
from t5x_diffeq.model.block import can_split_length
from t5x_diffeq.model.config import ModelConfig
from t5x_diffeq.model.language_model import LanguageModel
from t5x_diffeq.model.layers.context import length_shards
from t5x_diffeq.model.layers.mesh import axes_of, mesh_axes, shards_over
from t5x_diffeq.model.plugin_checks import check_block, check_source
from t5x_diffeq.model.scheme_checks import check_scheme
from t5x_diffeq.model.sub_fields import make_block
from t5x_diffeq.system.chips import chip
from t5x_diffeq.system.errors import InputError
from t5x_diffeq.training import partitioning

_SMALLEST_CHUNK = 2048  # tokens
_LOGITS_PART = 1 / 64  # the part of a device's memory that the logits of a chunk may take
Placed = TypeVar("Placed", bound="PlacedModel")


@dataclass(frozen=True, eq=False)
class PlacedModel:
    """A model, and how its parameters and batches are sharded."""

    config: Config
    model: LanguageModel
    mesh: Mesh
    rules: partitioning.Rules  # the rules from logical to mesh axes
    batch_sharding: NamedSharding  # the sharding of a batch's rows, and of their tokens
    abstract_params: Any  # shape, dtype and sharding of each parameter
    attention_reason: str  # why this attention kernel was chosen

    def at_depth(self: Placed, num_steps: int | None, scheme: str | None = None) -> Placed:
        """The same model, with the same parameters, on another grid; see `ModelConfig.at_depth`."""
        model = self.model.at_depth(num_steps, scheme)
        grid = {"model.num_steps": model.config.num_steps, "model.scheme": model.config.scheme}
        return replace(self, model=model, config=self.config.with_values(grid))

    def with_whole_rows(self: Placed) -> Placed:
        """The same model, with batches whose rows no mesh axis splits; `context` splits the batch.

        Text is generated and scored so, since a single new token can't be split.
        """
        if self.mesh.shape["context"] == 1:
            return self
        rules = partitioning.whole_row_rules(self.rules)
        return replace(
            self, rules=rules, batch_sharding=partitioning.batch_sharding(self.mesh, rules)
        )

    @property
    def train_config(self) -> TrainKeys:
        """`config.train`, with `loss_chunk` chosen if it isn't set."""
        return replace(self.config.train, loss_chunk=self.loss_chunk)

    @property
    def loss_chunk(self) -> int:
        """`train.loss_chunk`; if that is None, the largest power of two within `_LOGITS_PART`.

        Large chunks are faster: every chunk reads and writes the whole gradient of the head.
        """
        if self.config.train.loss_chunk is not None:
            return self.config.train.loss_chunk
        figures = chip(self.mesh.devices.flat[0].device_kind)
        if figures is None:
            return _SMALLEST_CHUNK
        vocabulary = self.model.config.padded_vocab_size / self.mesh.shape["tensor"]
        fitting = _LOGITS_PART * figures.memory_bytes / (4 * vocabulary)  # float32
        return max(_SMALLEST_CHUNK, 2 ** int(log2(fitting)))

    def context(self) -> AbstractContextManager:
        """A context in which arrays are sharded over the mesh by the rules."""
        return partitioning.mesh_context(self.mesh, self.rules)

    def abstract_batch(self, batch_size: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Shape, dtype and sharding of a global batch."""
        shape = (batch_size, self.model.config.max_length)
        dtypes = {"inputs": jnp.int32, "targets": jnp.int32, "mask": jnp.float32}
        if not self.config.data.cross_documents:
            dtypes |= {"segments": jnp.int32, "positions": jnp.int32}
        return {
            name: jax.ShapeDtypeStruct(shape, dtype, sharding=self.batch_sharding)
            for name, dtype in dtypes.items()
        }

    def eval_batch_size(self, batch_size: int) -> int:
        """`batch_size` rounded up to a multiple of the shards of a batch; masked rows fill it."""
        rows = axes_of(self.batch_sharding.spec[0])
        shards = prod(self.mesh.shape[axis] for axis in rows)
        return -(-batch_size // shards) * shards


def with_attention_on(
    mesh: Mesh, model_config: ModelConfig, segments: bool
) -> tuple[ModelConfig, str]:
    """A config with the attention kernel for a mesh, as from `ModelConfig.with_attention_for`."""
    device = mesh.devices.flat[0]
    return model_config.with_attention_for(
        device.platform,
        segments,
        shards=mesh.shape["context"],
        capability=getattr(device, "compute_capability", None),
    )


def place_model(config: Config, vocab_size: int, mesh: Mesh) -> PlacedModel:
    """The model of `config` on a mesh, for a tokenizer with `vocab_size` tokens.

    Raises:
      InputError: if `config.model` is invalid, by itself or on the mesh.
    """
    model_config, attention_reason = with_attention_on(
        mesh,
        ModelConfig.of(config.model, vocab_size, config.data.sequence_length),
        segments=not config.data.cross_documents,
    )
    if model_config.block is not None:
        check_block(model_config)
    if is_plugin(model_config.weights):
        check_source(model_config, config.train.depths)
    if is_plugin(model_config.scheme):
        check_scheme(model_config)
    model_config = model_config.for_platform(mesh.devices.flat[0].platform)
    check_context(model_config, mesh)
    model, rules = LanguageModel(model_config), partitioning.logical_rules(config.mesh)
    return PlacedModel(
        config=config,
        model=model,
        mesh=mesh,
        rules=rules,
        batch_sharding=partitioning.batch_sharding(mesh, rules),
        abstract_params=partitioning.shard_shapes(declared_params(model), mesh, rules),
        attention_reason=attention_reason,
    )


def check_context(model: ModelConfig, mesh: Mesh) -> None:
    """Checks that sequences can be split over `mesh.context`."""
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


def declared_params(model: LanguageModel) -> dict:
    """The parameters' shapes, boxed with their declarations; nothing is computed."""
    rows, length = least_batch(model)
    if (shards := length_shards()) > 1:  # the model's own length may not be divisible by them
        length = 2 * shards
    tokens = jax.ShapeDtypeStruct((rows, length), jnp.int32)
    return jax.eval_shape(model.init, jax.random.key(0), tokens)["params"]


def least_batch(model: LanguageModel) -> tuple[int, int]:
    """The rows and length of the smallest batch: a row per shard, for layers under `shard_map`."""
    return shards_over(mesh_axes("batch")), model.config.max_length
