"""Saves adapters as small files in a workdir's `adapters/`, and loads them onto their base model.

`adapters.npz` holds everything that the run trained, adapters and embeddings; `adapters.json` the
grid, the rank, and the norms of the base's weights, which detect a different base.
"""

import io
import json
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.experimental.multihost_utils import process_allgather

from t5x_diffeq.config.config import Config
from t5x_diffeq.config.plugins import check_trusted
from t5x_diffeq.system.console import format_count, say
from t5x_diffeq.system.errors import InputError
from t5x_diffeq.system.files import AnyPath, parse_json, write_whole

_FOLDER, _ARRAYS, _FACTS = "adapters", "adapters.npz", "adapters.json"
_KEYS = ("weights", "num_steps", "scheme", "adapter_rank", "adapter_alpha", "adapter_kernels")
_SAME = 1e-5  # relative difference of norms that a different order of summation can cause


def save_adapters(config: Config, params: dict, trained: list[str], workdir: AnyPath) -> None:
    """Writes `adapters/` of a run that has trained these parts; every process calls it."""
    parts = {name: params[name] for name in trained}
    arrays = process_allgather(flatten_dict(parts, sep="/"), tiled=True)
    model = {key: getattr(config.model, key) for key in _KEYS}
    facts = AdapterFacts(model, _norms(params))
    if jax.process_index() > 0:
        return
    packed = io.BytesIO()
    np.savez(packed, **arrays)
    write_whole(workdir / _FOLDER / _ARRAYS, packed.getvalue())
    write_whole(workdir / _FOLDER / _FACTS, json.dumps(facts._asdict(), indent=2).encode())
    size = format_count(sum(array.size for array in arrays.values()))
    say(f"adapters: {size} numbers in {workdir / _FOLDER}, for --adapters with the base's workdir")


class AdapterFacts(NamedTuple):
    """The content of `adapters.json`."""

    model: dict[str, object]  # the keys of `config.model` that adapters change
    norms: dict[str, float]  # of the base's weights


def read_adapter_facts(folder: AnyPath) -> AdapterFacts:
    """What the folder says about its adapters, whose code of other packages must be trusted."""
    try:
        facts = parse_json((folder / _FACTS).read_bytes())
        model = {key: value for key, value in facts["model"].items() if key in _KEYS}
        norms = facts["norms"]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise InputError(
            f"--adapters={folder} holds no adapters ({error}); give the adapters/ of a run that "
            "finetune made with :lora"
        ) from error
    check_trusted({f"model.{key}": value for key, value in model.items()}, folder / _FACTS)
    return AdapterFacts(model, norms)


def load_adapters(folder: AnyPath, params: dict, abstract: dict) -> dict:
    """The base's parameters on the adapters' grid, with the adapters and what else they replace.

    `abstract` has the shapes and shardings of the base with adapters; `params` are without them.
    """
    base = read_adapter_facts(folder).norms
    here = _norms(params)
    if here.keys() != base.keys() or not all(
        np.isclose(here[name], base[name], rtol=_SAME) for name in base
    ):
        raise InputError(
            f"--adapters={folder} were trained on other weights than this workdir's; give the "
            "workdir (and --checkpoint) that their run started from"
        )
    flat, shapes = flatten_dict(params, sep="/"), flatten_dict(abstract, sep="/")
    with np.load(io.BytesIO((folder / _ARRAYS).read_bytes())) as arrays:
        for name in arrays.files:
            flat[name] = jax.device_put(arrays[name], shapes[name].sharding)
    return unflatten_dict(flat, sep="/")


def _norms(params: dict) -> dict[str, float]:
    frozen = flatten_dict({"source": params["source"]}, sep="/")
    of_each = jax.jit(lambda tree: jax.tree.map(lambda x: jnp.linalg.norm(x.ravel()), tree))
    return {name: float(norm) for name, norm in of_each(frozen).items()}
