"""The compiler's options for the train step: one table, for every kind of device.

An option belongs to a program, not to a process. So the step has these options however a run is
started, and `plan` and `benchmark` compile the same program.
"""

import os
import re
from collections.abc import Mapping
from functools import cache
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from t5x_diffeq.system.console import log
from t5x_diffeq.system.environment import COMBINE_MIB, SPARSE_CORE

Options = dict[str, bool | int]

# Without this option, XLA copies both of Adam's moments before it replaces them, which takes up to
# an eighth of the time of a small ODE's step (docs/lab/step_cost.md).
_CPUS: Options = {"xla_cpu_copy_insertion_use_region_analysis": True}

# By default, an operation may use 16 MiB of VMEM, which is all that a core of a v4 has. A product
# that is fused with other operations can then take 1.7 times as long (docs/lab/tpu_step.md).
_VMEM: Options = {"xla_tpu_scoped_vmem_limit_kib": 48 * 1024}
_OFFLOAD = "xla_tpu_enable_sparse_core_collective_offload_"
# Collectives run on SparseCores, beside the TensorCores; without these options, v5p and v6e wait
# for every collective. On TPU7x they are the compiler's defaults.
_SPARSE_CORE: Options = {
    f"{_OFFLOAD}{kind}": True
    for kind in ("all_gather", "2d_all_gather", "3d_all_gather", "reduce_scatter", "all_reduce")
}
# GPUs have no options here: their compiler hides collectives by itself (docs/lab/tpu_step.md).
_TPUS: dict[str, Options] = {
    "TPU v4": {"xla_enable_async_all_gather": True},
    "TPU v5 lite": _VMEM,
    "TPU v5": _VMEM | _SPARSE_CORE,
    "TPU v5p": _VMEM | _SPARSE_CORE,
    "TPU v6 lite": _VMEM | _SPARSE_CORE,
    "TPU7x": _VMEM | _SPARSE_CORE,
}
# The thresholds up to which collectives are combined. A TPU's compiler has a threshold for sums
# alone.
_COMBINED = {
    "tpu": ("xla_jf_crs_combiner_threshold_in_bytes",),
    "gpu": (
        "xla_gpu_all_gather_combine_threshold_bytes",
        "xla_gpu_reduce_scatter_combine_threshold_bytes",
        "xla_gpu_all_reduce_combine_threshold_bytes",
    ),
}


def step_options(device: Any, environment: Mapping[str, str] = os.environ) -> Options:
    """XLA's options for the train step on such devices, without options that the user's flags set.

    T5X_DIFFEQ_SPARSE_CORE=0 keeps collectives off the SparseCores, and T5X_DIFFEQ_COMBINE_MIB=64
    lets the compiler combine collectives up to 64 MiB.
    """
    platform = device.platform
    if platform == "cpu":
        return _CPUS
    options = _TPUS.get(device.device_kind, {})
    if SPARSE_CORE.read(environment) == 0:
        options = options | dict.fromkeys(_SPARSE_CORE.keys() & options, False)
    if mib := COMBINE_MIB.read(environment):
        options = options | dict.fromkeys(_COMBINED[platform], mib * 2**20)
    flags = (environment.get(name, "") for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS"))
    users = re.findall(r"--(\w+)", " ".join(flags))
    left = tuple((name, value) for name, value in options.items() if name not in users)
    return _known(device, left) if left else {}


@cache
def _known(device: Any, options: tuple[tuple[str, bool | int], ...]) -> Options:
    """The options that the device's compiler knows; releases of XLA drop some."""
    alone = Mesh(np.array([device]), ("alone",))
    scalar = jax.ShapeDtypeStruct((), "float32", sharding=NamedSharding(alone, PartitionSpec()))
    try:
        with jax.set_mesh(alone):  # whatever mesh the step is for
            jax.jit(lambda x: x, compiler_options=dict(options)).lower(scalar).compile()
    except jax.errors.JaxRuntimeError as error:
        unknown = re.search(r"No such compile option: '(\w+)'", str(error))
        if not unknown:
            raise
        log(f"warning: {unknown[1]} is unknown to the installed compiler, and left out")
        return _known(device, tuple(each for each in options if each[0] != unknown[1]))
    return dict(options)
