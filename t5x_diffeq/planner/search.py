"""Searches for the fastest plan of a config on a topology, in stages.

It compiles meshes first, with the config's own remat policy; if none fits, with more recomputation
and more microbatches. Then it tries the other remat policies on the best mesh, and then
microbatches and attention's blocks on the best plan.
"""

from collections.abc import Callable, Iterator, Mapping
from itertools import product
from math import prod
from typing import Any

from t5x_diffeq.config.config import Config
from t5x_diffeq.model.layers.attention_kernels import splash_block
from t5x_diffeq.planner.planning import Plan, plan_setup, state_bytes
from t5x_diffeq.planner.topology import Topology
from t5x_diffeq.system.console import log
from t5x_diffeq.system.errors import InputError
from t5x_diffeq.training.partitioning import AXES, batch_shards

# The last recomputes most and saves least.
POLICIES = ("none", "dots", "keep:qkv,attention,mlp", "keep:qkv,attention", "full")
_BLOCKS = (512, 1024)  # of splash attention; larger ones don't fit into fast memory
_CONTEXT_SIZES = (1, 2, 4, 8, 16)
_SHORTEST_CHUNK = 1024  # tokens; for shorter chunks, moving keys and values costs too much
_TENSOR_SIZES = (1, 2, 4, 8)  # beyond, communicating activations in every layer costs too much
_MOST_MESHES = 8  # that are compiled

Changes = dict[str, Any]  # values by dotted key


def search(
    config: Config, vocab_size: int, topology: Topology, compile_plan: Callable[[str, Config], Plan]
) -> list[tuple[Changes, Plan]]:
    """The plans that fit, or may fit, with what they change in the config; the fastest first.

    `compile_plan` takes a title, which shows the search's progress, and a config.

    Raises:
      InputError: if nothing fits.
    """
    fitting: list[tuple[Changes, Plan]] = []

    def compile_all(stage: str, candidates: list[Changes]) -> None:
        for number, changes in enumerate(candidates, start=1):
            title = f"{stage}, {number} of {len(candidates)}"
            try:
                plan = compile_plan(title, config.with_values(changes))
            except InputError as error:
                log(f"left out: {as_flags(changes)}: {error}")
                continue
            if plan.memory.fits is not False:
                fitting.append((changes, plan))
        fitting.sort(key=lambda changes_and_plan: _slowness(changes_and_plan[1]))

    parts, full = config.train.microbatches, Changes({"model.remat": "full"})
    smaller = (full | {"train.microbatches": factor * parts} for factor in (2, 4, 8))
    recompute = [full] if config.model.remat != "full" else []
    for more in (Changes(), *recompute, *smaller):
        compile_all("meshes", _meshes_to_try(config.with_values(more), vocab_size, topology, more))
        if fitting:
            break
    else:
        raise InputError(
            f"--sweep: no plan fits {topology.name}; take a larger topology, or a smaller model or "
            "batch (plan without --sweep says how much is needed)"
        )
    best, _ = fitting[0]
    remats = [
        {"model.remat": it} for it in POLICIES if it != best.get("model.remat", config.model.remat)
    ]
    compile_all("remat", [best | remat for remat in remats])
    best, plan = fitting[0]
    attention = plan.setup.model.config.attention
    details = _with_details(config.with_values(best), attention)
    compile_all("details", [best | other for other in details])
    return fitting


def _slowness(plan: Plan) -> float:
    """What plans are ranked by: the middle of the estimate, or bytes moved if there is none."""
    if plan.times:
        return plan.times.middle
    assert plan.cost and plan.traffic is not None  # it was compiled, so it fits or may fit
    return plan.cost.memory_bytes + sum(moved.bytes for moved in plan.traffic.values())


def _meshes_to_try(
    config: Config, vocab_size: int, topology: Topology, more: Changes
) -> list[Changes]:
    """The changes for the first meshes whose devices can hold the state, and `more`."""
    to_try: list[Changes] = []
    for sizes in meshes(config, len(topology.devices), topology.slices):
        mesh = {f"mesh.{axis}": size for axis, size in sizes.items()}
        try:
            setup = plan_setup(config.with_values(mesh), vocab_size, topology)
        except InputError as error:
            log(f"left out: {as_flags(mesh)}: {error}")
            continue
        figures = topology.figures
        if figures is None or sum(state_bytes(setup)) < figures.memory_bytes:
            to_try.append(mesh | more)
        if len(to_try) == _MOST_MESHES:
            break
    return to_try


def meshes(config: Config, num_devices: int, slices: int = 1) -> Iterator[dict[str, int]]:
    """Meshes of all the devices that the config's sizes are divisible by.

    Meshes that shard parameters most, and activations least, come first. Only `data` crosses
    slices: over their network, weights would take far longer than the optimizer step.
    """
    for context, tensor in product(_CONTEXT_SIZES, _TENSOR_SIZES):
        rest = num_devices // (context * tensor)
        for fsdp in (n for n in range(rest, 0, -1) if rest % n == 0):
            sizes = (rest // fsdp, fsdp, context, tensor)
            mesh = dict(zip(AXES, sizes, strict=True))
            fills = prod(sizes) == num_devices and mesh["data"] % slices == 0
            if fills and _is_divisible(config, mesh):
                yield mesh


def _is_divisible(config: Config, mesh: Mapping[str, int]) -> bool:
    model, train = config.model, config.train
    heads = model.num_kv_heads or model.num_heads
    rows = (train.batch_size, batch_shards(mesh) * train.microbatches)
    tensor_sizes = (heads, mesh["tensor"]), (model.mlp_dim, mesh["tensor"])
    length, chunks = config.data.sequence_length, 2 * mesh["context"]
    if mesh["context"] > 1 and (length % chunks or length // chunks < _SHORTEST_CHUNK):
        return False
    sizes = (rows, (model.embed_dim, mesh["fsdp"]), *tensor_sizes)
    return all(size % n == 0 for size, n in sizes)


def _with_details(config: Config, attention: str) -> list[Changes]:
    """Changes that matter less than mesh and remat: microbatches, and splash's blocks."""
    changes: list[Changes] = [{"train.microbatches": 2 * config.train.microbatches}]
    if attention.startswith("splash"):
        length, model = config.data.sequence_length, config.model
        width = model.head_dim or model.embed_dim // model.num_heads
        chosen = splash_block(attention, length, width)
        sizes = (size for size in _BLOCKS if size != chosen and length % size == 0)
        changes += [{"model.attention": f"splash:{size}"} for size in sizes]
    return changes


def as_flags(keys: Changes) -> str:
    """The changes as command line flags."""
    return " ".join(f"--config.{key}={value}" for key, value in keys.items())
