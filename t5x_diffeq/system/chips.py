"""Accelerator specifications: dense bf16 FLOP/s, memory, bandwidths; per device as JAX counts them.

TPUs: docs.cloud.google.com/tpu/docs/{v4,v5e,v5p,v6e,tpu7x}; memory is what the compiler lets a
program use. A TPU7x chip is two devices, so its numbers here are half of the chip's. GPUs: NVIDIA's
data sheets, without sparsity, with float32 sums. An SXM module has the network of a DGX, one
adapter per GPU, with 200 Gbit/s for an A100 and 400 Gbit/s for later modules; other GPUs are
assumed to have such an adapter, too. The link of a PCIe card is PCIe, because a bridge joins only
two cards.
"""

from dataclasses import dataclass
from math import inf

GIB = 2**30


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
    # A GPU's 32-bit integer operations/s: 64 units in each multiprocessor, at its boost clock.
    integer_operations: float = inf


def _gpu(
    flops: float, memory: tuple[float, float], link: float, network: float, units: float
) -> Chip:
    """A GPU of so many multiprocessors times their boost clock; memory: bytes, and bytes/s."""
    return Chip(flops, *memory, link, 1, network, integer_operations=64 * units)


_A100 = {"flops": 312e12, "network": 25e9, "units": 108 * 1.41e9}
_HOPPER = {"flops": 989e12, "link": 450e9, "network": 50e9, "units": 132 * 1.755e9}
_NVL = _HOPPER | {"flops": 835e12, "link": 64e9}

# By `jax.Device.device_kind`.
CHIPS = {
    "TPU v4": Chip(275e12, 30.75 * GIB, 1228e9, 300e9, 6, 6.25e9, 1.05e9),
    "TPU v5 lite": Chip(197e12, 15.75 * GIB, 819e9, 200e9, 4, 3.125e9, 1.5e9),
    "TPU v5": Chip(459e12, 95.74 * GIB, 2765e9, 600e9, 6, 6.25e9, 1.75e9),
    "TPU v5p": Chip(459e12, 95.74 * GIB, 2765e9, 600e9, 6, 6.25e9, 1.75e9),
    "TPU v6 lite": Chip(918e12, 31.25 * GIB, 1638e9, 400e9, 4, 12.5e9, 1.75e9),
    "TPU7x": Chip(2307e12 / 2, 94.75 * GIB, 7380e9 / 2, 300e9, 6, 12.5e9 / 2, 2.2e9),
    "NVIDIA A100-SXM4-40GB": _gpu(**_A100, memory=(40e9, 1555e9), link=300e9),
    "NVIDIA A100-SXM4-80GB": _gpu(**_A100, memory=(80e9, 2039e9), link=300e9),
    "NVIDIA A100-PCIE-40GB": _gpu(**_A100, memory=(40e9, 1555e9), link=32e9),
    "NVIDIA A100 80GB PCIe": _gpu(**_A100, memory=(80e9, 1935e9), link=32e9),
    "NVIDIA H100 80GB HBM3": _gpu(**_HOPPER, memory=(80e9, 3350e9)),
    "NVIDIA H100 PCIe": _gpu(756e12, (80e9, 2039e9), 64e9, 50e9, 114 * 1.755e9),
    "NVIDIA H100 NVL": _gpu(**_NVL, memory=(94e9, 3938e9)),
    "NVIDIA H200": _gpu(**_HOPPER, memory=(141e9, 4800e9)),
    "NVIDIA H200 NVL": _gpu(**_NVL, memory=(141e9, 4800e9)),
    "NVIDIA GH200 120GB": _gpu(**_HOPPER, memory=(96e9, 4000e9)),
    "NVIDIA GH200 480GB": _gpu(**_HOPPER, memory=(96e9, 4000e9)),
    "NVIDIA GH200 144G HBM3e": _gpu(**_HOPPER, memory=(144e9, 4900e9)),
    "NVIDIA B200": _gpu(2250e12, (180e9, 7700e9), 900e9, 50e9, 148 * 1.85e9),
    "NVIDIA GB200": _gpu(2500e12, (186e9, 8000e9), 900e9, 50e9, 152 * 1.85e9),
    "NVIDIA L40S": _gpu(362e12, (48e9, 864e9), 32e9, 25e9, 142 * 2.52e9),
    "NVIDIA GeForce RTX 4090": _gpu(165.2e12, (24e9, 1008e9), 32e9, 25e9, 128 * 2.52e9),
}


def chip(device_kind: str) -> Chip | None:
    """The specifications of a `jax.Device.device_kind`; None for an unknown kind."""
    return CHIPS.get(device_kind)
