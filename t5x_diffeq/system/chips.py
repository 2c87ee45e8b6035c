"""Accelerator specifications: dense bf16 FLOP/s, memory, bandwidths; per device as JAX counts them.

TPUs: docs.cloud.google.com/tpu/docs/{v4,v5e,v5p,v6e,tpu7x}; memory is what the compiler lets a
program use, and VMEM is what JAX's Pallas says. A TPU7x chip is two devices, so its numbers here
are half of the chip's. GPUs: NVIDIA's data sheets of the SXM modules, without sparsity; their
network is that of a DGX, one adapter per GPU (A100: 200 Gbit/s, later ones 400).
"""

import re
from dataclasses import dataclass
from math import inf

MIB, GIB = 2**20, 2**30


@dataclass(frozen=True)
class Chip:
    """Specifications of one device."""

    peak_flops: float  # bf16 FLOP/s of the matrix units
    memory_bytes: float  # of HBM that a program can use
    memory_bandwidth: float  # bytes/s of HBM
    link_bandwidth: float  # bytes/s sent over all links together (TPU: ICI; GPU: NVLink)
    links: int  # 1 where any device reaches any other at full bandwidth
    network_bandwidth: float  # bytes/s to other TPU slices or GPU machines, each device's share
    clock: float | None = None  # cycles/s of the compiler's estimates; None where it makes none
    vector_memory: int = 0  # bytes of a TPU core's VMEM; 0: not a TPU
    # A GPU's 32-bit integer operations/s: 64 units in each multiprocessor, at its boost clock.
    integer_operations: float = inf


CHIPS = {
    "TPU v4": Chip(275e12, 30.75 * GIB, 1228e9, 300e9, 6, 6.25e9, 1.05e9, 16 * MIB),
    "TPU v5 lite": Chip(197e12, 15.75 * GIB, 819e9, 200e9, 4, 3.125e9, 1.5e9, 128 * MIB),
    "TPU v5": Chip(459e12, 95.74 * GIB, 2765e9, 600e9, 6, 6.25e9, 1.75e9, 64 * MIB),
    "TPU v5p": Chip(459e12, 95.74 * GIB, 2765e9, 600e9, 6, 6.25e9, 1.75e9, 64 * MIB),
    "TPU v6 lite": Chip(918e12, 31.25 * GIB, 1638e9, 400e9, 4, 12.5e9, 1.75e9, 128 * MIB),
    "TPU7x": Chip(2307e12 / 2, 94.75 * GIB, 7380e9 / 2, 300e9, 6, 12.5e9 / 2, 2.2e9, 64 * MIB),
    "A100": Chip(312e12, 80e9, 2039e9, 300e9, 1, 25e9, integer_operations=64 * 108 * 1.41e9),
    "H100": Chip(989e12, 80e9, 3350e9, 450e9, 1, 50e9, integer_operations=64 * 132 * 1.755e9),
    "H200": Chip(989e12, 141e9, 4800e9, 450e9, 1, 50e9, integer_operations=64 * 132 * 1.755e9),
    "B200": Chip(2250e12, 180e9, 7700e9, 900e9, 1, 50e9, integer_operations=64 * 148 * 1.85e9),
}


def chip(device_kind: str) -> Chip | None:
    """The specifications of a `jax.Device.device_kind`; None for an unknown kind.

    A TPU's kind is a key of `CHIPS`; a GPU's contains one, as in "NVIDIA H100 80GB HBM3".
    """
    if device_kind in CHIPS:
        return CHIPS[device_kind]
    words = re.findall(r"[A-Z0-9]+", device_kind) if device_kind.startswith("NVIDIA") else []
    return next((CHIPS[word] for word in words if word in CHIPS), None)
