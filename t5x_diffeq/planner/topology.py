"""Devices to compile for, which need not be attached: TPU slices, GPU nodes, virtual CPU devices.

XLA's compilers for TPUs and GPUs run without the hardware.
"""

import importlib.util
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
from jax.experimental import topologies

from t5x_diffeq.planner.gpu_targets import TARGETS, target_config
from t5x_diffeq.planner.links import rings
from t5x_diffeq.system.chips import Chip, chip
from t5x_diffeq.system.errors import InputError
from t5x_diffeq.system.extras import install_command

_GPUS_PER_NODE = 8  # where the name gives a count alone
_GPUS = {name.lower(): name for name in TARGETS}
_PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")
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
      compiled_by: whose compiler: "tpu", "cuda" or "cpu".
      nodes: the number of GPU nodes, joined by their network adapters.
    """

    name: str
    slices: int
    devices: list[jax.Device]
    kind: str
    compiled_by: str
    nodes: int = 1

    @property
    def gpus(self) -> bool:
        """Whether the intended devices are GPUs."""
        return self.kind in TARGETS

    @property
    def figures(self) -> Chip | None:
        """The specifications of the intended devices, if known."""
        return chip(self.kind)

    @contextmanager
    def as_target(self) -> Iterator[None]:
        """A context in which JAX takes the intended GPUs for those of this machine.

        Raises:
          InputError: if it would call cuDNN, and that isn't installed.
        """
        if self.compiled_by != "cuda":
            yield
            return
        # JAX asks the machine's own GPU what cuDNN's attention may be given, instead of the one to
        # compile for (jax 0.10.2, 0.12.0).
        from jax._src.cudnn import fused_attention_stablehlo as of_cudnn

        ours = TARGETS[self.kind].capability
        kept = of_cudnn.check_compute_capability, of_cudnn.is_cuda_compute_capability_equal

        def parse(capability: str) -> tuple[int, ...]:
            return tuple(int(part) for part in capability.split("."))

        of_cudnn.check_compute_capability = lambda least: ours >= parse(least)
        of_cudnn.is_cuda_compute_capability_equal = lambda other: ours == parse(other)
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, jax.errors.JaxRuntimeError) or "cuDNN" not in str(error):
                raise
            raise InputError(
                f"model.attention=cudnn: {str(error).rstrip('.')}. It needs no GPU: "
                "pip install nvidia-cudnn-cu13; or set model.attention=xla"
            ) from error
        finally:
            of_cudnn.check_compute_capability, of_cudnn.is_cuda_compute_capability_equal = kept


def make_topology(name: str, slices: int = 1) -> Topology:
    """`v5p:4x4x4`, `h100:8`, `h100:8x8` or `cpu:8`; called before JAX starts its backends.

    Devices of TPUs and GPUs can be compiled for, but not run on. Of GPUs, `h100:8x8` are eight
    nodes of eight; a count alone is one node, or nodes of eight.

    Args:
      name: the name of one slice, or of all GPUs.
      slices: the number of equal TPU slices.

    Raises:
      InputError: if there is no such topology, or a package that it needs isn't installed.
    """
    if not re.fullmatch(r"\w+:\d+(x\d+)*", name):
        raise InputError(
            f"--topology={name}: it must have the form v5p:4x4x4, v6e:16x16, h100:8x8 or cpu:8"
        )
    if slices < 1:
        raise InputError(f"--slices={slices}: it must be at least 1")
    jax.config.update("jax_platforms", "cpu")
    kind, _, size = name.partition(":")
    if kind != "cpu" and kind not in _GPUS:
        devices = _tpu_devices(name, kind, slices)
        return Topology(name, slices, devices, devices[0].device_kind, "tpu")
    if slices > 1:
        raise InputError(
            f"--slices={slices}: only TPUs have slices; leave it out for {name} (h100:2x8 are two "
            "nodes)"
        )
    if kind == "cpu":
        return Topology(name, 1, _cpu_devices(name, size), "cpu", "cpu")
    nodes, per_node = _nodes(name, size)
    devices = _gpu_devices(name, _GPUS[kind], nodes, per_node)
    return Topology(name, 1, devices, _GPUS[kind], "cuda", nodes)


def _nodes(name: str, size: str) -> tuple[int, int]:
    """The number of GPU nodes, and of GPUs in each."""
    match [int(part) for part in size.split("x")]:
        case [count] if 0 < count <= _GPUS_PER_NODE:
            return 1, count
        case [count] if count and count % _GPUS_PER_NODE == 0:
            return count // _GPUS_PER_NODE, _GPUS_PER_NODE
        case [nodes, per_node] if nodes and per_node:
            return nodes, per_node
    raise InputError(
        f"--topology={name}: give a count of GPUs, as in h100:8, or nodes and GPUs of each, as in "
        f"h100:8x8; a count beyond {_GPUS_PER_NODE} is a multiple of it"
    )


def _gpu_devices(name: str, kind: str, nodes: int, per_node: int) -> list[jax.Device]:
    """Virtual GPUs to compile for, node by node; a process for each node."""
    _need_compiler(name, "GPU", "gpu_compiler", *_PLUGINS)
    described = topologies.get_topology_desc(
        platform="cuda",
        topology_name=kind,
        target_config=target_config(kind),
        topology=f"1x{nodes}x{per_node}",
    )
    return list(described.devices)


def _cpu_devices(name: str, size: str) -> list[jax.Device]:
    """Virtual devices of this machine."""
    if not size.isdecimal() or int(size) < 1:
        raise InputError(f"--topology={name}: give a count of devices, as in cpu:8")
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
    _need_compiler(name, "TPU", "tpu", "libtpu")
    for variable, value in LIBTPU_ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    options: dict[str, Any] = {"num_slices": slices} if slices > 1 else {}
    extents = [int(size) for size in name.partition(":")[2].split("x")]
    if any(closed := rings(extents)):  # without them XLA pads all-gathers with zeros and sums them
        options["wrap"] = (*closed, False)[:3]
    # On a TPU v4 JAX makes one device of a chip's two cores; a topology does so if requested.
    options |= {"chip_config_name": "megacore"} if kind == "v4" else {}
    try:
        described = topologies.get_topology_desc(platform="tpu", topology_name=name, **options)
    except jax.errors.JaxRuntimeError as error:
        raise InputError(
            f"--topology={name} is not known to the TPU's compiler: {error}"
        ) from error
    return list(described.devices)


def _need_compiler(name: str, of: str, extra: str, *packages: str) -> None:
    if not any(importlib.util.find_spec(package) for package in packages):
        raise InputError(
            f"--topology={name} needs the {of}'s compiler, which runs without a {of}: "
            f"{install_command(extra)}"
        )
