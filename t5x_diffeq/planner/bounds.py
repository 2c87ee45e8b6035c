"""What a config can't do better than on a topology, found without compiling it."""

from dataclasses import dataclass

from t5x_diffeq.planner.planning import state_bytes
from t5x_diffeq.training.chips import Chip
from t5x_diffeq.training.flops import kernel_size, step_flops
from t5x_diffeq.training.setup import Setup


@dataclass(frozen=True)
class Bound:
    """Lower bounds of one device.

    Attributes:
      seconds: of a step.
      bytes: of memory: the train state alone.
    """

    seconds: float
    bytes: float


def lower_bound(setup: Setup, batch_size: int, figures: Chip) -> Bound:
    """All FLOPs at the peak, the state read and written once, and the least of communication.

    Collectives are taken to have every link. On TPUs none is taken to overlap, since the compiler
    waits for those of weights and gradients; on GPUs all are. Making W(t) is repeated by each part
    of the data axis.
    """
    flops, sizes = step_flops(setup.model.config, batch_size), setup.mesh.shape
    parts = sizes["fsdp"] * sizes["tensor"]
    shared = (flops.total - flops.hypernetwork) / setup.mesh.size
    compute = (shared + flops.hypernetwork / parts) / figures.peak_flops
    moved = moved_bytes(setup, batch_size) / figures.link_bandwidth
    state = sum(state_bytes(setup))
    if figures.clock is None:  # a GPU: see `estimate`
        return Bound(max(compute, moved), state)
    return Bound(compute + moved + 2 * state / figures.memory_bandwidth, state)


def moved_bytes(setup: Setup, batch_size: int) -> float:
    """Bytes that each device sends in a step, at least.

    Weights are gathered over fsdp forward and backward, their gradient is scattered over it and
    summed over data; each microbatch does so. Of each sub-field the output, and the gradient of its
    input, are summed over tensor.
    """
    config, sizes = setup.model.config, setup.mesh.shape
    data, fsdp, tensor = (sizes[axis] for axis in ("data", "fsdp", "tensor"))
    itemsize = config.compute_dtype.itemsize
    entries = config.num_steps * (kernel_size(config, "attention") + kernel_size(config, "mlp"))
    weights = entries * itemsize / tensor
    of_weights = 3 * weights * (fsdp - 1) / fsdp + 2 * weights / fsdp * (data - 1) / data
    tokens = batch_size * config.max_length / data / fsdp
    of_activations = 4 * config.num_steps * tokens * config.embed_dim * itemsize
    return setup.microbatches * of_weights + of_activations * 2 * (tensor - 1) / tensor
