"""Descriptions of NVIDIA GPUs from which XLA compiles for them on a machine without one.

The figures are those of NVIDIA's data sheets and of the CUDA C++ Programming Guide (technical
specifications per compute capability). The text is a `GpuTargetConfigProto` of OpenXLA
(`xla/stream_executor/device_description.proto`), with no field that jaxlib 0.10.2 doesn't know.
"""

from dataclasses import dataclass

from t5x_diffeq.system.chips import CHIPS

_KIB, _MIB = 2**10, 2**20
_CUDNN = (9, 8)  # the oldest that JAX takes
_CUDA = "13.0.0"  # of `jax[cuda13]`; without a version, no product in fp8 becomes cuBLAS's call


@dataclass(frozen=True)
class GpuTarget:
    """What the compiler asks about a GPU, beside the figures of `chips.CHIPS`.

    Attributes:
      capability: CUDA's compute capability.
      multiprocessors: their number.
      float32_units: of each multiprocessor.
      shared_memory: bytes of each multiprocessor; a block of threads can use 1 KiB less.
      cache: bytes of L2.
      clock: GHz of the multiprocessors, at most.
    """

    capability: tuple[int, int]
    multiprocessors: int
    float32_units: int
    shared_memory: int
    cache: int
    clock: float


TARGETS = {
    "A100": GpuTarget((8, 0), 108, 64, 164 * _KIB, 40 * _MIB, 1.41),
    "H100": GpuTarget((9, 0), 132, 128, 228 * _KIB, 50 * _MIB, 1.98),
    "H200": GpuTarget((9, 0), 132, 128, 228 * _KIB, 50 * _MIB, 1.98),
    "B200": GpuTarget((10, 0), 148, 128, 228 * _KIB, 126 * _MIB, 1.965),
}


def target_config(kind: str) -> str:
    """The text that describes a GPU of this kind, a key of `TARGETS`, to the compiler."""
    it, figures = TARGETS[kind], CHIPS[kind]
    major, minor = it.capability
    return f"""
gpu_device_info {{
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  core_count: {it.multiprocessors}
  fpus_per_core: {it.float32_units}
  clock_rate_ghz: {it.clock}
  device_memory_size: {int(figures.memory_bytes)}
  memory_bandwidth: {int(figures.memory_bandwidth)}
  l2_cache_size: {it.cache}
  shared_memory_per_core: {it.shared_memory}
  shared_memory_per_block: {48 * _KIB}
  shared_memory_per_block_optin: {it.shared_memory - _KIB}
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
device_description_str: "NVIDIA {kind}"
"""
