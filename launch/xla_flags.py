"""Prints the XLA flags of a GPU run: those of $XLA_FLAGS, and ours, as far as jaxlib knows them.

    export XLA_FLAGS="$(python launch/xla_flags.py)"

XLA ends the process at a flag that it doesn't know, and drops flags from one release to the next.
So the installed jaxlib is asked; what it doesn't know is left out, with a warning.
"""

import os
import re
import subprocess
import sys

# Hide communication behind computation: FSDP's gathers and scatters beside the step that uses them.
OURS = (
    "--xla_gpu_enable_latency_hiding_scheduler=true",
    "--xla_gpu_enable_pipelined_all_gather=true",
    "--xla_gpu_enable_pipelined_reduce_scatter=true",
    "--xla_gpu_enable_pipelined_all_reduce=true",
    "--xla_gpu_enable_while_loop_double_buffering=true",
)
PROBE = [sys.executable, "-c", "import jax; jax.devices()"]  # reads the flags, needs no GPU


def complaint(flags: list[str]) -> str:
    """What jaxlib says of the flags; nothing if it takes them."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": " ".join(flags)}
    ended = subprocess.run(PROBE, env=environment, capture_output=True, text=True)
    return ended.stderr if ended.returncode else ""


def known(flags: list[str]) -> list[str]:
    """The flags that jaxlib takes."""
    said = complaint(flags)
    if not said:
        return flags
    named = re.search(r"Unknown flags? in XLA_FLAGS: (.*)", said)
    unknown = set(named.group(1).split()) & set(flags) if named else set()
    if not unknown:
        warn(f"jaxlib does not take XLA_FLAGS={' '.join(flags)!r}; none of ours is set")
        return [flag for flag in flags if flag not in OURS]
    for flag in sorted(unknown):
        warn(f"{flag} is unknown to the installed jaxlib, and left out")
    return known([flag for flag in flags if flag not in unknown])


def warn(message: str) -> None:
    """A line on standard error."""
    print(f"warning: {message}", file=sys.stderr)


def main() -> None:
    """Prints them; the user's come last, so that they win."""
    given = os.environ.get("XLA_FLAGS", "").split()
    names = {flag.partition("=")[0] for flag in given}
    print(" ".join(known([flag for flag in OURS if flag.partition("=")[0] not in names] + given)))


if __name__ == "__main__":
    main()
