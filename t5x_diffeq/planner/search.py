"""Other ways to run the same config on the same devices: what to compile next."""

from collections.abc import Iterator, Mapping
from itertools import product
from math import prod
from typing import Any

from t5x_diffeq.layers.attention_kernels import splash_blocks
from t5x_diffeq.ode.schemes import is_reversible
from t5x_diffeq.runtime.config import Config
from t5x_diffeq.training.partitioning import AXES, batch_shards, pipeline_microbatches

# The last recomputes most and saves least.
POLICIES = ("none", "dots", "keep:qkv,attention,mlp", "keep:qkv,attention", "full")
_REVERSIBLE_POLICIES = ("none", "full")  # of reversible schemes
_BLOCKS = (512, 1024)  # of splash attention; larger ones don't fit into fast memory
_CONTEXT_SIZES = (1, 2, 4, 8, 16)
_SHORTEST_CHUNK = 1024  # tokens of a sequence; of fewer, moving keys and values costs too much
_TENSOR_SIZES = (1, 2, 4, 8)  # beyond, communicating activations in every layer costs too much

Changes = dict[str, Any]  # values by dotted key


def _is_divisible(config: Config, mesh: Mapping[str, int]) -> bool:
    model, train = config.model, config.train
    heads = model.num_kv_heads or model.num_heads
    parts = train.microbatches * pipeline_microbatches(model.pipeline_microbatches, mesh)
    rows = (train.batch_size, batch_shards(mesh) * parts)
    of_tensor = (heads, mesh["tensor"]), (model.mlp_dim, mesh["tensor"])
    length, chunks = config.data.sequence_length, 2 * mesh["context"]
    if mesh["context"] > 1 and (length % chunks or length // chunks < _SHORTEST_CHUNK):
        return False
    sizes = (rows, (model.embed_dim, mesh["stage"] * mesh["fsdp"]), *of_tensor)
    return all(size % n == 0 for size, n in sizes)


def meshes(config: Config, num_devices: int, slices: int = 1) -> Iterator[dict[str, int]]:
    """Meshes of all the devices that the config's sizes are divisible by.

    They have as many stages as the config's. Those that shard parameters most, and activations
    least, come first. Only data and stages cross slices: over their network, weights would take far
    longer than the optimizer step.
    """
    stage = max(config.mesh.stage, 1)
    for context, tensor in product(_CONTEXT_SIZES if stage == 1 else (1,), _TENSOR_SIZES):
        rest = num_devices // (context * tensor) // stage
        for fsdp in (n for n in range(rest, 0, -1) if rest % n == 0):
            sizes = (stage, rest // fsdp, fsdp, 1, context, tensor)
            mesh = dict(zip(AXES, sizes, strict=True))
            whole = prod(sizes) == num_devices and stage * mesh["data"] % slices == 0
            if whole and _is_divisible(config, mesh):
                yield mesh


def with_meshes(config: Config, num_devices: int, slices: int = 1) -> list[Changes]:
    """The changes for each mesh."""
    found = meshes(config, num_devices, slices)
    return [{f"mesh.{axis}": size for axis, size in mesh.items()} for mesh in found]


def _policies(config: Config) -> tuple[str, ...]:
    """The remat policies that the config's scheme can have."""
    return _REVERSIBLE_POLICIES if is_reversible(config.model.scheme) else POLICIES


def with_remats(config: Config) -> list[Changes]:
    """The changes for each other remat policy."""
    return [{"model.remat": remat} for remat in _policies(config) if remat != config.model.remat]


def with_details(config: Config, attention: str) -> list[Changes]:
    """Changes that matter less than mesh and remat: microbatches, and splash's blocks."""
    found: list[Changes] = [{"train.microbatches": 2 * config.train.microbatches}]
    if attention.startswith("splash"):
        length, model = config.data.sequence_length, config.model
        width = model.head_dim or model.embed_dim // model.num_heads
        chosen = splash_blocks(attention, length, width).size
        sizes = (size for size in _BLOCKS if size != chosen and length % size == 0)
        found += [{"model.attention": f"splash:{size}"} for size in sizes]
    return found


def remedies(config: Config, mesh: dict[str, int]) -> Iterator[tuple[str, Config]]:
    """What may make a config fit, each as flags and a config, the least costly first.

    More remat costs time; fewer sequences at once or another mesh cost communication; a smaller
    batch changes the training.

    Args:
      config: the config that doesn't fit.
      mesh: the mesh on which it was tried.
    """
    for keys in _candidates(config, mesh):
        other = config.with_values(keys)
        if _is_divisible(other, {axis: keys.get(f"mesh.{axis}", mesh[axis]) for axis in AXES}):
            yield as_flags(keys), other


def _candidates(config: Config, mesh: Mapping[str, int]) -> Iterator[Changes]:
    """The changes of each remedy, whether or not the sizes are divisible."""
    data, fsdp = mesh["data"], mesh["fsdp"]
    kept, train, policies = config.model.remat, config.train, _policies(config)
    for remat in policies[policies.index(kept) + 1 :] if kept in policies else ():
        yield {"model.remat": remat}
    full = {} if kept == "full" else {"model.remat": "full"}
    if data > 1:
        yield {**full, "mesh.data": 1, "mesh.fsdp": data * fsdp}
    for parts in (2, 4, 8):
        yield {**full, "train.microbatches": parts * train.microbatches}
    if fsdp % 2 == 0:
        for axis in ("context", "tensor"):
            yield {**full, "mesh.fsdp": fsdp // 2, f"mesh.{axis}": 2 * mesh[axis]}
    for parts in (n for n in (2, 4, 8) if train.batch_size % n == 0):
        yield {**full, "train.batch_size": train.batch_size // parts}


def as_flags(keys: Changes) -> str:
    """The changes as command line flags."""
    return " ".join(f"--config.{key}={value}" for key, value in keys.items())
