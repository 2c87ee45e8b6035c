"""Devices to compile for, which need not be attached: TPU slices, GPU nodes, virtual CPU devices.

XLA's compilers for TPUs and GPUs run without the hardware. A GPU is described to them by a
`GpuTargetConfigProto` of OpenXLA (`xla/stream_executor/device_description.proto`), with no field
that jaxlib 0.10.2 doesn't know, and the figures of NVIDIA's data sheets and of the CUDA C++
Programming Guide (technical specifications per compute capability).
"""

import importlib.util
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
from jax.experimental import topologies

from t5x_diffeq.system.chips import CHIPS, Chip, chip
from t5x_diffeq.system.errors import InputError
from t5x_diffeq.system.extras import install_command

_KIB, _MIB = 2**10, 2**20
_CUDNN = (9, 8)  # the oldest that JAX takes
_CUDA = "13.0.0"  # of `jax[cuda13]`; without a version, no product in fp8 becomes cuBLAS's call


@dataclass(frozen=True)
class GpuTarget:
    """What the compiler asks about a GPU, beside the figures of `chips.CHIPS`."""

    capability: tuple[int, int]  # CUDA's compute capability
    multiprocessors: int  # their number
    float32_units: int  # of each multiprocessor
    shared_memory: int  # bytes of each multiprocessor; a block of threads can use 1 KiB less
    cache: int  # bytes of L2
    clock: float  # GHz of the multiprocessors, at most


# By the kind of the SXM module, a key of `chips.CHIPS`.
TARGETS = {
    "NVIDIA A100-SXM4-80GB": GpuTarget((8, 0), 108, 64, 164 * _KIB, 40 * _MIB, 1.41),
    "NVIDIA H100 80GB HBM3": GpuTarget((9, 0), 132, 128, 228 * _KIB, 50 * _MIB, 1.98),
    "NVIDIA H200": GpuTarget((9, 0), 132, 128, 228 * _KIB, 50 * _MIB, 1.98),
    "NVIDIA B200": GpuTarget((10, 0), 148, 128, 228 * _KIB, 126 * _MIB, 1.965),
}


def target_config(kind: str) -> str:
    """The text that describes a GPU of this kind, a key of `TARGETS`, to the compiler."""
    target, figures = TARGETS[kind], CHIPS[kind]
    major, minor = target.capability
    return f"""
gpu_device_info {{
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  core_count: {target.multiprocessors}
  fpus_per_core: {target.float32_units}
  clock_rate_ghz: {target.clock}
  device_memory_size: {int(figures.memory_bytes)}
  memory_bandwidth: {int(figures.memory_bandwidth)}
  l2_cache_size: {target.cache}
  shared_memory_per_core: {target.shared_memory}
  shared_memory_per_block: {48 * _KIB}
  shared_memory_per_block_optin: {target.shared_memory - _KIB}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  threads_per_warp: 32
  threads_per_core_limit: 2048
  threads_per_block_limit: 1024
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  driver_version: "{_CUDA}"
  runtime_version: "{_CUDA}"
  compile_time_toolkit_version: "{_CUDA}"
}}
platform_name: "CUDA"
dnn_version_info {{ major: {_CUDNN[0]} minor: {_CUDNN[1]} }}
device_description_str: "{kind}"
"""


_GPUS_PER_NODE = 8  # where the name gives a count alone
GPUS = dict(zip(("a100", "h100", "h200", "b200"), TARGETS, strict=True))
_TPUS = ("v2", "v3", "v4", "v5e", "v5p", "v6e", "tpu7x")
_CUBIC = ("v4", "v5p", "tpu7x")  # their chips are connected in three dimensions
_PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")
# A slice's dimension closes to a ring if its size is a multiple of this (v4, v5p, TPU7x: in slices
# of whole cubes of 4x4x4; v5e, v6e: in a whole pod of 16x16). docs.cloud.google.com/tpu/docs
_CUBE, _POD = 4, 16
# Without these, libtpu looks for a TPU on this machine, and for another process that uses it.
LIBTPU_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5p-8",  # any type: the topology decides
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


@dataclass(frozen=True)
class Topology:
    """Devices to compile for."""

    name: str  # the requested name
    slices: int  # the number of TPU slices, joined by the data-centre network
    devices: list[jax.Device]  # the devices that JAX compiles for
    kind: str  # the kind of the intended devices, a key of `chips.CHIPS`; "cpu" for virtual ones
    compiled_by: str  # whose compiler: "tpu", "cuda" or "cpu"
    nodes: int = 1  # the number of GPU nodes, joined by their network adapters

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
        # JAX asks the machine's own GPU, and not the GPU to compile for, which inputs cuDNN's
        # attention can take (jax 0.10.2, 0.12.0).
        from jax._src.cudnn import fused_attention_stablehlo as cudnn

        capability = TARGETS[self.kind].capability
        originals = cudnn.check_compute_capability, cudnn.is_cuda_compute_capability_equal

        def parse(version: str) -> tuple[int, ...]:
            return tuple(int(part) for part in version.split("."))

        cudnn.check_compute_capability = lambda least: capability >= parse(least)
        cudnn.is_cuda_compute_capability_equal = lambda other: capability == parse(other)
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
            cudnn.check_compute_capability, cudnn.is_cuda_compute_capability_equal = originals


def make_topology(name: str, slices: int = 1) -> Topology:
    """`v5p:4x4x4`, `H100:8`, `h100:8x8` or `cpu:8`; called before JAX starts its backends.

    Programs can be compiled for TPUs and GPUs, but not run. `h100:8x8` are eight nodes of eight
    GPUs; a count of GPUs alone is one node, or nodes of eight.

    Args:
      name: the name of one slice, or of all GPUs.

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
    name = name.lower()
    kind, _, size = name.partition(":")
    if kind not in ("cpu", *GPUS, *_TPUS):
        raise InputError(
            f"--topology={name}: {kind} isn't known; there are the TPUs {', '.join(_TPUS)}, the "
            f"GPUs {', '.join(GPUS)}, and cpu"
        )
    if kind != "cpu" and kind not in GPUS:
        sizes = [int(part) for part in size.split("x")]
        if 0 in sizes or (kind in _CUBIC and len(sizes) != 3):
            form = f"{kind}:2x2x1" if kind in _CUBIC else f"{kind}:4x4"
            raise InputError(f"--topology={name}: a slice has the form {form}, without zeros")
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
    devices = _gpu_devices(name, GPUS[kind], nodes, per_node)
    return Topology(name, 1, devices, GPUS[kind], "cuda", nodes)


def _nodes(name: str, size: str) -> tuple[int, int]:
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
    # Without rings, XLA turns all-gathers into all-reduces of zero-padded buffers.
    if any(closed := rings(extents)):
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


def rings(extents: Sequence[int]) -> tuple[bool, ...]:
    """Whether each dimension of a TPU slice closes to a ring."""
    if len([n for n in extents if n > 1]) > 2:
        return (all(n % _CUBE == 0 for n in extents),) * len(extents)
    return tuple(n == _POD for n in extents)


def _need_compiler(name: str, device: str, extra: str, *packages: str) -> None:
    if not any(importlib.util.find_spec(package) for package in packages):
        raise InputError(
            f"--topology={name} needs the {device}'s compiler, which runs without a {device}: "
            f"{install_command(extra)}"
        )
