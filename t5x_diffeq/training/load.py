"""Loads a trained run from its workdir, on its own grid or another; or weights for a new run.

A new run begins with the trained run's weights on the requested grid: W(t) of a time-dependent or
shared source is made at the grid's nodes and becomes layer weights; layer weights, which exist only
on their own grid, stay as they are.

Adapters are small files in a workdir's `adapters/`: `adapters.npz` holds everything that the run
trained, adapters and embeddings; `adapters.json` the grid, the rank, and the norms of the base's
weights, which detect a different base.
"""

import io
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import gcd
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.experimental.multihost_utils import process_allgather
from jax.sharding import Mesh

from t5x_diffeq.checkpoints.restoring import restore_params
from t5x_diffeq.checkpoints.stored import TrainState
from t5x_diffeq.checkpoints.workdir import read_config
from t5x_diffeq.config.config import Config
from t5x_diffeq.config.plugins import check_trusted
from t5x_diffeq.model.config import ModelConfig
from t5x_diffeq.model.language_model import LanguageModel
from t5x_diffeq.model.layers.array_types import Weights
from t5x_diffeq.model.ode.sources import LayerWeights, source_of
from t5x_diffeq.model.sub_fields import need_methods
from t5x_diffeq.system.compilation_cache import enable_cache
from t5x_diffeq.system.console import Progress, format_count, log
from t5x_diffeq.system.errors import InputError
from t5x_diffeq.system.files import AnyPath, describe_error, digest, parse_json, write_whole
from t5x_diffeq.system.foreign_files import MOST_BYTES_OF_ARRAYS, read_inside
from t5x_diffeq.training.partitioning import Rules, make_mesh, shard_shapes
from t5x_diffeq.training.placed_model import PlacedModel, declared_params, place_model
from t5x_diffeq.training.setup import Setup

_FOLDER, _ARRAYS, _FACTS = "adapters", "adapters.npz", "adapters.json"
_KEYS = ("weights", "num_steps", "scheme", "adapter_rank", "adapter_alpha", "adapter_kernels")
_RESTORE = "restore the folder, or train the adapters again"
_SAME = 1e-5  # relative difference of norms that a different order of summation can cause
Grid = tuple[int | None, str | None]  # number of solver steps and scheme; None: the run's own


@dataclass(frozen=True)
class Run:
    """A model with its trained parameters."""

    placed: PlacedModel  # on this process's devices
    params: dict
    step: int  # the checkpoint's

    def at_depth(self, num_steps: int | None, scheme: str | None = None) -> "Run":
        """The same run, with the same parameters, on another grid; see `ModelConfig.at_depth`."""
        return replace(self, placed=self.placed.at_depth(num_steps, scheme))


@dataclass(frozen=True)
class PretrainedRun:
    """A trained run that another one starts from."""

    workdir: AnyPath
    vocab_size: int  # of its tokenizer
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
        """The run's parameters on its own grid, sharded over a mesh; and their step."""
        # Parameters have the same shapes with any attention kernel, and XLA's accepts any length.
        declared = declared_params(LanguageModel(replace(self.model, attention="xla")))
        shapes = shard_shapes(declared, mesh, rules)
        verify = self.config.train.verify_checkpoints
        return restore_params(self.workdir, shapes, self.checkpoint, verify)

    def params_for(self, placed: PlacedModel) -> tuple[dict, int]:
        """The run's parameters converted to the requested model, without adapters; and its step.

        The requested model has per-layer weights, or the run's own kind of weights on any grid.
        Call within `placed.context`.
        """
        asked = placed.model.config
        self.check(asked)
        params, step = self.params(placed.mesh, placed.rules)
        on_grid = self._on_grid(asked)
        if asked.weights == on_grid.weights and not on_grid.adapter_rank:
            return params, step
        shardings = jax.tree.map(lambda x: x.sharding, placed.abstract_params["source"]["weights"])
        convert = jax.jit(partial(discretise, on_grid), out_shardings=shardings)
        kept = {name: part for name, part in params.items() if name not in ("source", "adapters")}
        return {**kept, "source": {"weights": convert(params)}}, step

    def _on_grid(self, asked: ModelConfig) -> ModelConfig:
        """The run's model on the grid of the requested one, if its weights exist there."""
        return LanguageModel(self.model).at_depth(asked.num_steps, asked.scheme).config

    def check(self, asked: ModelConfig) -> None:
        """Checks that the run's weights can be converted to the kind of the requested model."""
        on_grid = self._on_grid(asked)
        layers = isinstance(source_of(asked), LayerWeights)
        if not layers and asked.weights != on_grid.weights:
            raise InputError(
                f"model.weights={asked.weights}: {self.workdir} holds a model of {on_grid.weights} "
                "weights, which can't be converted to these; tune it with :lora or :full"
            )
        if asked.max_length != on_grid.max_length and on_grid.architecture == "gpt":
            raise InputError(
                f"data.sequence_length={asked.max_length}: {self.workdir} has learned positions "
                f"for {on_grid.max_length} tokens; leave the key out"
            )


def discretise(config: ModelConfig, params: dict) -> Weights:
    """The weights of a pass as parameters of `LayerWeights`: `[nodes, ...]` in float32.

    If the source computes the weights, it does so in the run's own dtype: the new model then
    computes with the same numbers, bit for bit. Stored weights are float32, in which merging
    adapters loses nothing.
    """
    exact = config.in_float32() if source_of(config).stored else config
    weights = LanguageModel(exact).apply({"params": params}, method="merged_weights")
    return jax.tree.map(lambda w: w.astype(jnp.float32), weights)


def init_from_pretrained(setup: Setup, pretrained: PretrainedRun) -> tuple[TrainState, int]:
    """A new state with the run's parameters and freshly initialised adapters; and the run's step.

    Call within `setup.context`.
    """
    state = setup.init_state()
    params, step = pretrained.params_for(setup)
    return replace(state, params={**state.params, **params}), step


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

    It also enables the cache of compiled programs for the rest of the process.

    Args:
      workdir: the run's workdir.
      vocab_size: the vocabulary size of its tokenizer.
      batch_size: sequences in a batch.
      checkpoint: the step of the checkpoint, or "best"; None is the newest.
      grids: the requested grids; if the weights don't exist on one of them, that is an error
        before the checkpoint is read.
      methods: the methods that its block must have, which are also checked before.
      adapters: the folder of adapters that another run trained on this one's weights.
      averages: take the moving averages of the parameters (train.ema_decay).
    """
    if adapters and averages:
        raise InputError(
            "--averages and --adapters exclude each other: adapters fit the last weights; omit one"
        )
    enable_cache()
    run = PretrainedRun(workdir, vocab_size, checkpoint)
    adapter_keys = read_adapter_facts(adapters).model if adapters else {}
    config = run.config.with_values(
        {
            **{f"model.{key}": value for key, value in adapter_keys.items()},
            **dict.fromkeys(("mesh.context", "mesh.tensor"), 1),
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


# ------------------------------------------------------------------------------ adapters


def save_adapters(config: Config, params: dict, trained: list[str], workdir: AnyPath) -> None:
    """Writes `adapters/` of a run that has trained these parts; every process calls it."""
    parts = {name: params[name] for name in trained}
    arrays = process_allgather(flatten_dict(parts, sep="/"), tiled=True)
    model = {key: getattr(config.model, key) for key in _KEYS}
    norms = _norms(params)
    if jax.process_index() > 0:
        return
    packed = io.BytesIO()
    np.savez(packed, **arrays)
    facts = AdapterFacts(model, norms, digest([packed.getvalue()]))
    write_whole(workdir / _FOLDER / _ARRAYS, packed.getvalue())
    write_whole(workdir / _FOLDER / _FACTS, json.dumps(facts._asdict(), indent=2).encode())
    size = format_count(sum(array.size for array in arrays.values()))
    log(f"adapters: {size} numbers in {workdir / _FOLDER}, for --adapters with the base's workdir")


class AdapterFacts(NamedTuple):
    """The content of `adapters.json`."""

    model: dict[str, object]  # the keys of `config.model` that adapters change
    norms: dict[str, float]  # of the base's weights
    arrays: str | None = None  # the digest of `adapters.npz`, which older folders lack


def read_adapter_facts(folder: AnyPath) -> AdapterFacts:
    """What the folder says about its adapters, whose code of other packages must be trusted."""
    try:
        facts = parse_json(read_inside(folder / _FACTS))
        model = {key: value for key, value in facts["model"].items() if key in _KEYS}
        norms = {str(name): float(norm) for name, norm in facts["norms"].items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise InputError(
            f"--adapters={folder} holds no adapters ({error}); give the adapters/ of a run that "
            "finetune made with :lora"
        ) from error
    check_trusted({f"model.{key}": value for key, value in model.items()}, folder / _FACTS)
    return AdapterFacts(model, norms, facts.get("arrays"))


def load_adapters(folder: AnyPath, params: dict, abstract: dict) -> dict:
    """The base's parameters on the adapters' grid, with all parts that the adapters' run trained.

    `abstract` has the shapes and shardings of the base with adapters; `params` are without them.
    """
    facts = read_adapter_facts(folder)
    base, norms = facts.norms, _norms(params)
    if norms.keys() != base.keys() or not all(
        np.isclose(norms[name], base[name], rtol=_SAME) for name in base
    ):
        raise InputError(
            f"--adapters={folder} were trained on other weights than this workdir's; give the "
            "workdir (and --checkpoint) that their run started from"
        )
    flat, shapes = flatten_dict(params, sep="/"), flatten_dict(abstract, sep="/")
    trained = _read_arrays(folder, facts.arrays)
    parts = {name.partition("/")[0] for name in trained} | {"adapters"}
    expected = {name: x for name, x in shapes.items() if name.partition("/")[0] in parts}
    for name in sorted(expected.keys() | trained.keys()):
        fault = _fault_of_array(trained.get(name), expected.get(name))
        if fault or name.startswith("source/"):
            raise InputError(
                f"--adapters={folder}: in {_ARRAYS}, {name} {fault or 'is of the base'}; {_RESTORE}"
            )
        flat[name] = jax.device_put(trained[name], shapes[name].sharding)
    return unflatten_dict(flat, sep="/")


def _read_arrays(folder: AnyPath, expected: str | None) -> dict[str, np.ndarray]:
    """The arrays of adapters, by name; InputError if the file has another digest than this."""
    try:
        packed = read_inside(folder / _ARRAYS, MOST_BYTES_OF_ARRAYS)
        if expected not in (None, digest([packed])):
            raise ValueError(f"it isn't the file that {_FACTS} was written with")
        with np.load(io.BytesIO(packed)) as arrays:
            return {name: arrays[name] for name in arrays.files}
    except Exception as error:  # of a damaged archive, NumPy and zipfile raise many kinds
        raise InputError(
            f"--adapters={folder}: {_ARRAYS} can't be read: {describe_error(error)}; {_RESTORE}"
        ) from error


def _fault_of_array(array: np.ndarray | None, like: jax.ShapeDtypeStruct | None) -> str | None:
    """What is wrong with an array in place of one like this; None if nothing is."""
    if array is None or like is None:
        return "is missing" if array is None else "is no part of this model"
    if (array.shape, array.dtype) != (like.shape, like.dtype):
        return f"is {array.dtype}{[*array.shape]}, and must be {like.dtype}{[*like.shape]}"
    return None if np.isfinite(array).all() else "has values that aren't finite"


def _norms(params: dict) -> dict[str, float]:
    frozen = flatten_dict({"source": params["source"]}, sep="/")
    leaf_norms = jax.jit(lambda tree: jax.tree.map(lambda x: jnp.linalg.norm(x.ravel()), tree))
    return {name: float(norm) for name, norm in leaf_norms(frozen).items()}
