"""Loads a trained run from its workdir, on its own grid or another, or its weights for a new run.

A new run begins with the trained run's weights on the requested grid: W(t) of a time-dependent or
shared source is made at the grid's nodes and becomes layer weights; layer weights, which exist only
on their own grid, stay as they are.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import gcd

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from t5x_diffeq.checkpoints.restoring import restore_params
from t5x_diffeq.checkpoints.stored import TrainState
from t5x_diffeq.checkpoints.workdir import read_config
from t5x_diffeq.config.config import Config
from t5x_diffeq.model.config import ModelConfig
from t5x_diffeq.model.language_model import LanguageModel
from t5x_diffeq.model.layers.array_types import Weights
from t5x_diffeq.model.ode.sources import LayerWeights, source_of
from t5x_diffeq.model.sub_fields import need_methods
from t5x_diffeq.system.compilation_cache import enable_cache
from t5x_diffeq.system.console import Progress
from t5x_diffeq.system.errors import InputError
from t5x_diffeq.system.files import AnyPath
from t5x_diffeq.training.partitioning import Rules, make_mesh, shard_shapes
from t5x_diffeq.training.placed_model import PlacedModel, declared_params, place_model
from t5x_diffeq.training.setup import Setup

Grid = tuple[int | None, str | None]  # number of solver steps and scheme; None: the run's own


@dataclass(frozen=True)
class Run:
    """A model with its trained parameters."""

    placed: PlacedModel  # on this process's devices
    params: dict
    step: int  # the step of the checkpoint

    def at_depth(self, num_steps: int | None, scheme: str | None = None) -> "Run":
        """The same run, with the same parameters, on another grid; see `ModelConfig.at_depth`."""
        return replace(self, placed=self.placed.at_depth(num_steps, scheme))


@dataclass(frozen=True)
class PretrainedRun:
    """A trained run from which another run starts."""

    workdir: AnyPath
    vocab_size: int  # the vocabulary size of its tokenizer
    checkpoint: int | str | None = None  # its step, or "best"; None is the newest

    @cached_property
    def config(self) -> Config:
        """The run's config."""
        return read_config(self.workdir)

    @cached_property
    def model(self) -> ModelConfig:
        """The run's model config, on its own grid."""
        length = self.config.data.sequence_length
        return ModelConfig.of(self.config.model, self.vocab_size, length)

    def params(self, mesh: Mesh, rules: Rules) -> tuple[dict, int]:
        """The run's parameters on its own grid, sharded over a mesh, and the checkpoint's step."""
        # Parameters have the same shapes with any attention kernel, and XLA's accepts any length.
        declared = declared_params(LanguageModel(replace(self.model, attention="xla")))
        shapes = shard_shapes(declared, mesh, rules)
        verify = self.config.train.verify_checkpoints
        return restore_params(self.workdir, shapes, self.checkpoint, verify)

    def params_for(self, placed: PlacedModel) -> tuple[dict, int]:
        """The run's parameters for the requested model, without adapters, and the step.

        The requested model has per-layer weights, or the run's own kind of weights on any grid.
        Call this within `placed.context`.
        """
        requested = placed.model.config
        self.check(requested)
        params, step = self.params(placed.mesh, placed.rules)
        on_grid = self._on_grid(requested)
        if requested.weights == on_grid.weights and not on_grid.adapter_rank:
            return params, step
        shardings = jax.tree.map(lambda x: x.sharding, placed.abstract_params["source"]["weights"])
        convert = jax.jit(partial(discretise, on_grid), out_shardings=shardings)
        kept = {name: part for name, part in params.items() if name not in ("source", "adapters")}
        return {**kept, "source": {"weights": convert(params)}}, step

    def _on_grid(self, requested: ModelConfig) -> ModelConfig:
        """The run's model on the requested grid; an InputError if its weights don't exist there."""
        return LanguageModel(self.model).at_depth(requested.num_steps, requested.scheme).config

    def check(self, requested: ModelConfig) -> None:
        """Raises an InputError unless the run's weights can become those of the requested model."""
        on_grid = self._on_grid(requested)
        layers = isinstance(source_of(requested), LayerWeights)
        if not layers and requested.weights != on_grid.weights:
            raise InputError(
                f"model.weights={requested.weights}: {self.workdir} holds a model of "
                f"{on_grid.weights} weights, which can't be converted to these; tune it with :lora "
                "or :full"
            )
        if requested.max_length != on_grid.max_length and on_grid.architecture == "gpt":
            raise InputError(
                f"data.sequence_length={requested.max_length}: {self.workdir} has learned "
                f"positions for {on_grid.max_length} tokens; leave the key out"
            )


def discretise(config: ModelConfig, params: dict) -> Weights:
    """The weights of a pass as parameters of `LayerWeights`: `[nodes, ...]` in float32.

    If the source computes the weights, it does so in the run's own dtype, so that the new model
    computes with the same numbers, bit for bit. Stored weights are taken in float32, so that
    merging adapters doesn't round them.
    """
    exact = config.in_float32() if source_of(config).stored else config
    weights = LanguageModel(exact).apply({"params": params}, method="merged_weights")
    return jax.tree.map(lambda w: w.astype(jnp.float32), weights)


def init_from_pretrained(setup: Setup, pretrained: PretrainedRun) -> tuple[TrainState, int]:
    """A new state with the run's parameters and freshly initialised adapters, and the run's step.

    Call this within `setup.context`.
    """
    state = setup.init_state()
    params, step = pretrained.params_for(setup)
    # `Setup.complete` makes averages of these parameters.
    return replace(state, params={**state.params, **params}, averages=None), step


def load_run(
    workdir: AnyPath,
    vocab_size: int,
    *,
    batch_size: int,
    checkpoint: int | str | None = None,
    grids: Sequence[Grid] = (),
    methods: tuple[str, ...] = (),
    averages: bool = False,
) -> Run:
    """The run in `workdir`, on its own grid and as many devices as divide `batch_size`.

    It also enables the cache of compiled programs for the rest of the process.

    Args:
      workdir: the run's workdir.
      vocab_size: the vocabulary size of its tokenizer.
      batch_size: sequences in a batch.
      checkpoint: the step of the checkpoint, or "best"; None is the newest.
      grids: the grids on which the run will be used.
      methods: the methods that its block must have.
      averages: whether to load the moving averages of the parameters (train.ema_decay).

    Raises:
      InputError: if the weights don't exist on one of the grids, or the block lacks a method.
    """
    enable_cache()
    run = PretrainedRun(workdir, vocab_size, checkpoint)
    kernel = run.config.model.attention
    config = run.config.with_values(
        {
            # Parameters have the same shapes with any kernel, and all but XLA's need the kind of
            # device that the run was trained on.
            "model.attention": kernel if kernel == "xla" else "auto",
            **dict.fromkeys(("mesh.context", "mesh.tensor"), 1),
            "mesh.data": -1,
            "mesh.fsdp": gcd(run.config.model.embed_dim, batch_size),  # `fsdp` splits both
        }
    )
    placed = place_model(config, vocab_size, make_mesh(config.mesh, batch_size))
    need_methods(placed.model.config, methods)
    for num_steps, scheme in grids:
        placed.at_depth(num_steps, scheme)
    with Progress("reading the checkpoint"):
        verify = config.train.verify_checkpoints
        params, step = restore_params(workdir, placed.abstract_params, checkpoint, verify, averages)
    return Run(placed, params, step)
