"""How tests compile for the CPU: in a third of the time, unless `--whole` asks for what users get.

Loops are compiled without LLVM's optimizations, and by XLA's older emitter of kernels where there
is one, for which XLA fuses and copies a little differently. A test that measures memory compiles
with AS_FOR_USERS.
"""

import os
from importlib.metadata import version

DEVICES = "--xla_force_host_platform_device_count=8"
QUICK = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
    "--xla_cpu_parallel_codegen_split_count=1"
)
AS_FOR_USERS: dict[str, bool | int] = {"xla_backend_optimization_level": 3}
if version("jaxlib") < "0.11":  # which removed the older emitter, and with it the flag
    QUICK += " --xla_cpu_use_fusion_emitters=false"
    AS_FOR_USERS["xla_cpu_use_fusion_emitters"] = True


def flags_of_processes() -> str:
    """XLA_FLAGS of a process that a test starts: compiled likewise, for the devices it has."""
    return os.environ["XLA_FLAGS"].replace(DEVICES, "").strip()
