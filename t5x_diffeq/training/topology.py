"""Devices that one doesn't have: a slice of TPUs to compile for, or virtual CPU devices."""

import importlib.util
import os
import re

import jax
from jax.experimental import topologies

from t5x_diffeq.errors import InputError

# Without these libtpu looks for a TPU on this machine, or for the only process that may use it.
LIBTPU_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5p-8",  # any: the topology says what is compiled for
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


def topology_devices(name: str) -> list[jax.Device]:
    """The devices of a topology: `v5p:4x4x4`, or `cpu:8`; called before JAX starts its backends.

    A TPU's devices can be compiled for, but not run on.

    Raises:
      InputError: if there is no such topology, or what it needs isn't installed.
    """
    if not re.fullmatch(r"\w+:\d+(x\d+)*", name):
        raise InputError(f"--topology={name}: it is written like v5p:4x4x4, v6e:16x16 or cpu:8")
    jax.config.update("jax_platforms", "cpu")
    kind, _, size = name.partition(":")
    return cpu_devices(name, size) if kind == "cpu" else tpu_devices(name, kind)


def cpu_devices(name: str, size: str) -> list[jax.Device]:
    """Virtual devices of this machine.

    Raises:
      InputError: if `size` is no count, or JAX has started with fewer.
    """
    if not size.isdecimal() or int(size) < 1:
        raise InputError(f"--topology={name}: of virtual CPU devices give a count, as in cpu:8")
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


def tpu_devices(name: str, kind: str) -> list[jax.Device]:
    """The chips of a slice of TPUs (of a TPU7x, two devices per chip).

    Raises:
      InputError: if libtpu isn't installed or has no such topology.
    """
    if importlib.util.find_spec("libtpu") is None:
        raise InputError(
            f"--topology={name} needs the TPU's compiler, which runs without a TPU: "
            'pip install "t5x_diffeq[tpu]"'
        )
    for variable, value in LIBTPU_ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    # On a TPU v4 JAX makes one device of a chip's two cores; a topology does so when asked.
    cores = {"chip_config_name": "megacore"} if kind == "v4" else {}
    try:
        described = topologies.get_topology_desc(platform="tpu", topology_name=name, **cores)
    except jax.errors.JaxRuntimeError as error:
        raise InputError(
            f"--topology={name} is not known to the TPU's compiler: {error}"
        ) from error
    return list(described.devices)
