"""Prints the compiler flags of a run on GPUs or TPUs: the user's, and ours that the installed
compiler knows.

    export XLA_FLAGS="$(python launch/xla_flags.py gpu)"
    export LIBTPU_INIT_ARGS="$(python launch/xla_flags.py tpu v6e)"

XLA ends the process at a flag that it doesn't know, and drops flags from one release to the next.
So the installed jaxlib, or libtpu, is asked; what it doesn't know is left out, with a warning.

T5X_DIFFEQ_COMBINE_MIB=64 lets the compiler combine collectives up to 64 MiB. An invalid
value, of this variable or of XLA_CLIENT_MEM_FRACTION, ends the script with status 2.
"""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from typing import NoReturn

# Hide communication behind computation: FSDP's gathers and scatters beside the step that uses them.
GPU = (
    "--xla_gpu_enable_latency_hiding_scheduler=true",
    "--xla_gpu_enable_pipelined_all_gather=true",
    "--xla_gpu_enable_pipelined_reduce_scatter=true",
    "--xla_gpu_enable_pipelined_all_reduce=true",
    "--xla_gpu_enable_while_loop_double_buffering=true",
)
# The same on TPUs, and gradients that cross slices summed while the backward pass goes on.
TPU = (
    "--xla_enable_async_all_gather=true",
    "--xla_tpu_overlap_compute_collective_tc=true",
    "--xla_tpu_enable_data_parallel_all_reduce_opt=true",
    "--xla_tpu_data_parallel_opt_different_sized_ops=true",
)
GENERATIONS = {
    "v4": ("--xla_tpu_megacore_fusion_allow_ags=false",),  # two cores work as one
    "v5e": (  # on all others the compiler refuses to fuse all-gathers so
        "--xla_tpu_enable_async_collective_fusion=true",
        "--xla_tpu_enable_async_collective_fusion_fuse_all_gather=true",
        "--xla_tpu_enable_async_collective_fusion_multiple_steps=true",
    ),
    "v5p": ("--xla_tpu_megacore_fusion_allow_ags=false",),
    "v6e": (),
    "tpu7x": (),
}
# Collectives are combined up to so many bytes. Libtpu has a threshold for all-reduces alone.
COMBINE_MIB = "T5X_DIFFEQ_COMBINE_MIB"
COMBINED = {
    "gpu": (
        "--xla_gpu_all_gather_combine_threshold_bytes",
        "--xla_gpu_reduce_scatter_combine_threshold_bytes",
        "--xla_gpu_all_reduce_combine_threshold_bytes",
    ),
    "tpu": ("--xla_jf_crs_combiner_threshold_in_bytes",),
}
# The name that JAX reads now, and the one that it still takes.
MEMORY_FRACTION = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
# Neither touches an accelerator; the second loads libtpu as a compiler alone.
ASK_JAXLIB = "import jax; jax.devices()"
ASK_LIBTPU = (
    "from jax.experimental import topologies as t; "
    "t.get_topology_desc(platform='tpu', topology_name='v5e:2x2')"
)
COMPILER_ALONE = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5p-8",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


def ask(code: str, variables: dict[str, str]) -> str:
    """What the library says when it starts with these variables; nothing if it takes them."""
    environment = {**os.environ, **variables, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", code]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    return ended.stderr if ended.returncode else ""


def ask_jaxlib(flags: list[str]) -> str:
    """What jaxlib says of flags for XLA_FLAGS."""
    return ask(ASK_JAXLIB, {"XLA_FLAGS": " ".join(flags)})


def ask_libtpu(flags: list[str]) -> str:
    """What libtpu says of flags for LIBTPU_INIT_ARGS."""
    return ask(ASK_LIBTPU, {**COMPILER_ALONE, "LIBTPU_INIT_ARGS": " ".join(flags), "XLA_FLAGS": ""})


def find_unknown(flags: list[str], output: str) -> set[str]:
    """The flags that a library's message names as unknown: `--name=value`, or the name alone."""
    named = re.findall(r"Unknown flags? in XLA_FLAGS: (.*)", output)
    words = set(" ".join(named).split())
    words |= set(re.findall(r"Unknown command line flag '(\w+)'", output))
    return {flag for flag in flags if flag in words or name_of(flag) in words}


def name_of(flag: str) -> str:
    """`xla_name` of `--xla_name=value`."""
    return flag.lstrip("-").partition("=")[0]


def select_known(
    flags: list[str], ours: list[str], ask_library: Callable[[list[str]], str]
) -> list[str]:
    """The flags that the library takes."""
    output, library = ask_library(flags), ask_library.__name__.removeprefix("ask_")
    if not output:
        return flags
    unknown = find_unknown(flags, output)
    if not unknown:
        last = (output.strip().splitlines() or [""])[-1]
        warn(f"{library} does not start with {' '.join(flags)!r} ({last}); none of ours is set")
        return [flag for flag in flags if flag not in ours]
    for flag in sorted(unknown):
        warn(f"{flag} is unknown to the installed {library}, and left out")
    return select_known([flag for flag in flags if flag not in unknown], ours, ask_library)


def warn(message: str) -> None:
    """A line on standard error."""
    print(f"warning: {message}", file=sys.stderr)


def thresholds(kind: str) -> tuple[str, ...]:
    """The flags that COMBINE_MIB stands for."""
    given = os.environ.get(COMBINE_MIB)
    if not given:
        return ()
    if not given.isdecimal() or not 0 < int(given) < 2**20:
        refuse(f"{COMBINE_MIB}={given} is not a number of MiB, such as 64")
    return tuple(f"{name}={int(given) * 2**20}" for name in COMBINED[kind])


def check_memory_fraction() -> None:
    """Checks variables at which JAX would fail on the GPU, or which it would misread."""
    given = {name: os.environ[name] for name in MEMORY_FRACTION if os.environ.get(name)}
    if len(given) == 2:
        refuse(f"{' and '.join(given)} are both set; leave the second out")
    for name, value in given.items():
        try:
            fraction = float(value)
        except ValueError:
            fraction = 0.0
        if not 0 < fraction <= 1:
            refuse(f"{name}={value} is not a fraction of a GPU's memory, such as 0.92")


def refuse(message: str) -> NoReturn:
    """Ends the script as a verb ends on invalid input."""
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)


def generation_of(text: str) -> str:
    """v5p of `v5p-128`, v5e of `v5litepod-16`; as it is without a number."""
    word = text.partition("-")[0].lower()
    return {"v5litepod": "v5e"}.get(word, word)


def main(kind: str = "gpu", generation: str = "") -> None:
    """Prints them; the user's come last, so that they win."""
    variable, ours, ask_library = "XLA_FLAGS", GPU, ask_jaxlib
    if kind == "gpu":
        check_memory_fraction()
    if kind == "tpu":
        ours = TPU + GENERATIONS.get(generation_of(generation), ())
        variable, ask_library = "LIBTPU_INIT_ARGS", ask_libtpu
    given = os.environ.get(variable, "").split()
    names = {name_of(flag) for flag in given}
    ours = [flag for flag in (*ours, *thresholds(kind)) if name_of(flag) not in names]
    print(" ".join(select_known(ours + given, ours, ask_library)))


if __name__ == "__main__":
    main(*sys.argv[1:])
