"""Lower bounds on a config's step time and memory on a topology, without compiling it."""

from dataclasses import dataclass

from t5x_diffeq.ode.schemes import find_scheme
from t5x_diffeq.planner.flops import kernel_entries, step_flops
from t5x_diffeq.planner.planning import state_bytes
from t5x_diffeq.runtime.chips import Chip
from t5x_diffeq.training.setup import Setup


@dataclass(frozen=True)
class Bound:
    """Lower bounds for one device.

    Attributes:
      seconds: the time of an optimizer step.
      bytes: the memory, counting only the parameters and moments that lie there.
    """

    seconds: float
    bytes: float


def lower_bound(setup: Setup, batch_size: int, figures: Chip) -> Bound:
    """All FLOPs at the peak, the state read and written once, and the least communication.

    Collectives are assumed to use every link. On TPUs none is assumed to overlap, since the
    compiler waits for those of weights and gradients; on GPUs all are. Each shard of the data axis
    makes W(t) for itself.
    """
    flops, sizes = step_flops(setup.model.config, batch_size), setup.mesh.shape
    parts = sizes["stage"] * sizes["fsdp"] * sizes["expert"] * sizes["tensor"]
    shared = (flops.total - flops.hypernetwork) / setup.mesh.size * setup.pipeline_slowdown
    compute = (shared + flops.hypernetwork / parts) / figures.peak_flops
    moved = moved_bytes(setup, batch_size) / figures.link_bandwidth
    state = sum(state_bytes(setup)[:-1])
    if figures.clock is None:  # a GPU: see `estimate`
        return Bound(max(compute, moved), state)
    return Bound(compute + moved + 2 * state / figures.memory_bandwidth, state)


def moved_bytes(setup: Setup, batch_size: int) -> float:
    """The least number of bytes that each device sends in an optimizer step.

    Each microbatch gathers weights over fsdp, forward and backward, and scatters their gradient
    over fsdp and sums it over data and context. The output of each sub-field (attention or MLP),
    and the gradient of its input, are summed over tensor. Attention gathers keys and values over
    context, and scatters their gradient. A stage does so for its own steps, with each of its
    microbatches and at the ticks without one.
    """
    config, sizes = setup.model.config, setup.mesh.shape
    # Experts are counted as dense weights of their own shards.
    fsdp, context, tensor = sizes["fsdp"] * sizes["expert"], sizes["context"], sizes["tensor"]
    copies = sizes["data"] * context
    itemsize = config.compute_dtype.itemsize
    steps = config.num_steps / sizes["stage"]
    weights = steps * kernel_entries(config) * itemsize / tensor
    of_weights = 3 * weights * (fsdp - 1) / fsdp + 2 * weights / fsdp * (copies - 1) / copies
    tokens = batch_size * config.max_length / copies / fsdp * setup.pipeline_slowdown
    of_activations = 4 * steps * tokens * config.embed_dim * itemsize
    evaluations = steps * find_scheme(config.solver).evaluations[0]
    keys_and_values = 2 * config.kv_heads * config.head_width * itemsize / tensor
    passes = setup.config.train.microbatches * setup.pipeline_ticks
    return (
        passes * of_weights
        + of_activations * 2 * (tensor - 1) / tensor
        + 2 * evaluations * tokens * keys_and_values * (context - 1)
    )
