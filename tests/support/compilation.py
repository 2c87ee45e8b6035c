"""How tests compile for the CPU: in a third of the time, unless `--whole` asks for what users get.

Loops are compiled without LLVM's optimizations, and by XLA's older emitter of kernels where there
is one, for which XLA fuses and copies a little differently. A test that measures memory compiles
with AS_FOR_USERS.
"""

import os
from importlib.metadata import version
from typing import Any

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


class SharedPrograms(dict[tuple, Any]):
    """The programs that this process has compiled for its CPU devices, each once.

    Tests train the same small models many times, and JAX compiles each anew. Its cache on disk is
    of no help: several CPU devices deadlock in programs that are read.
    """

    def use(self) -> None:
        """Lets JAX take a program from here that was compiled for the same devices before."""
        from jax._src import cache_key, compiler

        compile_anew = compiler.compile_or_get_cached

        def compile_once(backend, module, devices, options, host_callbacks, *more, **named):
            arguments = backend, module, devices, options, host_callbacks, *more
            if host_callbacks or backend.platform != "cpu":
                return compile_anew(*arguments, **named)
            numbers = tuple(device.id for device in devices.flat)
            key = (cache_key.get(module, devices, options, backend), numbers)
            if key not in self:
                self[key] = compile_anew(*arguments, **named)
            return self[key]

        compiler.compile_or_get_cached = compile_once
