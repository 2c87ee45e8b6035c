"""Devices that aren't there: TPU slices to compile for, or virtual CPU devices.

The latter also stand in for GPUs, for which nothing can be compiled without one.
"""

import importlib.util
import os
import re
from dataclasses import dataclass

import jax
from jax.experimental import topologies

from t5x_diffeq.runtime.errors import InputError
from t5x_diffeq.training.chips import CHIPS, Chip, chip

_GPUS = {name.lower(): name for name in CHIPS if not name.startswith("TPU")}
# Without these, libtpu looks for a TPU on this machine, and for another process that uses it.
LIBTPU_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5p-8",  # any type: the topology decides
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


@dataclass(frozen=True)
class Topology:
    """Devices to compile for.

    Attributes:
      name: the requested name.
      slices: the number of TPU slices, joined by the data-centre network.
      devices: the devices that JAX compiles for.
      kind: the kind of the intended devices, a key of `chips.CHIPS`; "cpu" for virtual ones.
      gpus: whether the devices are virtual CPU devices in place of GPUs.
    """

    name: str
    slices: int
    devices: list[jax.Device]
    kind: str
    gpus: bool = False

    @property
    def cpus(self) -> bool:
        """Whether programs are compiled for CPU, which tells nothing about scheduling elsewhere."""
        return self.devices[0].platform == "cpu"

    @property
    def figures(self) -> Chip | None:
        """The specifications of the intended devices, if known."""
        return CHIPS[self.kind] if self.gpus else chip(self.kind)


def make_topology(name: str, slices: int = 1) -> Topology:
    """`v5p:4x4x4`, `h100:8` or `cpu:8`; called before JAX starts its backends.

    TPU devices can be compiled for, but not run on. There are no such devices for GPUs: equally
    many virtual devices of this machine's CPU stand in for them.

    Args:
      name: the name of one slice.
      slices: the number of equal TPU slices.

    Raises:
      InputError: if there is no such topology, or a package that it needs isn't installed.
    """
    if not re.fullmatch(r"\w+:\d+(x\d+)*", name):
        raise InputError(
            f"--topology={name}: it is written like v5p:4x4x4, v6e:16x16, h100:8 or cpu:8"
        )
    if slices < 1:
        raise InputError(f"--slices={slices}: it must be at least 1")
    jax.config.update("jax_platforms", "cpu")
    kind, _, size = name.partition(":")
    if kind != "cpu" and kind not in _GPUS:
        devices = _tpu_devices(name, kind, slices)
        return Topology(name, slices, devices, devices[0].device_kind)
    if slices > 1:
        raise InputError(f"--slices={slices}: only TPUs have slices; leave it out for {name}")
    devices = _cpu_devices(name, size)
    return Topology(name, slices, devices, _GPUS.get(kind, "cpu"), gpus=kind in _GPUS)


def _cpu_devices(name: str, size: str) -> list[jax.Device]:
    """Virtual devices of this machine."""
    if not size.isdecimal() or int(size) < 1:
        raise InputError(f"--topology={name}: give a count of devices, as in cpu:8 or h100:8")
    flags = os.environ.get("XLA_FLAGS", "")
    if "xla_force_host_platform_device_count" not in flags:
        flags = f"{flags} --xla_force_host_platform_device_count={size}"
        os.environ["XLA_FLAGS"] = flags.strip()
    devices = jax.devices("cpu")
    if len(devices) < int(size):
        raise InputError(
            f"--topology={name}: JAX has {len(devices)} CPU devices; XLA_FLAGS or an earlier use "
            "of JAX fixed their number"
        )
    return devices[: int(size)]


def _tpu_devices(name: str, kind: str, slices: int) -> list[jax.Device]:
    """The devices of TPU slices (for a TPU7x, two devices per chip)."""
    if importlib.util.find_spec("libtpu") is None:
        raise InputError(
            f"--topology={name} needs the TPU's compiler, which runs without a TPU: "
            'pip install "t5x_diffeq[tpu]"'
        )
    for variable, value in LIBTPU_ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    options: dict[str, int | str] = {"num_slices": slices} if slices > 1 else {}
    # On a TPU v4 JAX makes one device of a chip's two cores; a topology does so if requested.
    options |= {"chip_config_name": "megacore"} if kind == "v4" else {}
    try:
        described = topologies.get_topology_desc(platform="tpu", topology_name=name, **options)
    except jax.errors.JaxRuntimeError as error:
        raise InputError(
            f"--topology={name} is not known to the TPU's compiler: {error}"
        ) from error
    return list(described.devices)
