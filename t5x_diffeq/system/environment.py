"""The environment variables whose values are checked: each with its parser and its way out.

Only `read` reads them. Variables of other programs, such as WANDB_MODE and JAX_PLATFORMS, are used
unchecked; `errors.platform_error` names a value that JAX refuses.
"""

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from math import inf
from pathlib import Path
from typing import Generic, TypeVar

from t5x_diffeq.system.errors import InputError

_Value = TypeVar("_Value")


@dataclass(frozen=True)
class Variable(Generic[_Value]):
    """A variable of the environment.

    Attributes:
      name: its name.
      parse: returns the value that a text stands for; raises a ValueError if it stands for none.
      way_out: what the user can do about a text that `parse` refuses.
    """

    name: str
    parse: Callable[[str], _Value]
    way_out: str

    def read(self, environment: Mapping[str, str] | None = None) -> _Value | None:
        """The value; None if the variable is unset or empty.

        Args:
          environment: variables by name; None: this process's variables.

        Raises:
          InputError: if `parse` refuses the text.
        """
        text = (os.environ if environment is None else environment).get(self.name, "").strip()
        if not text:
            return None
        try:
            return self.parse(text)
        except ValueError as error:
            raise InputError(f"{self.name}={text}: {self.way_out}") from error


def split_words(text: str) -> list[str]:
    """The words of a list that commas or white space separate; "" where an entry is missing."""
    return re.split(r"\s*,\s*|\s+", text.strip())


def _number(allows: Callable[[float], bool]) -> Callable[[str], float]:
    def parse(text: str) -> float:
        if not allows(number := float(text)):
            raise ValueError(text)
        return number

    return parse


_parse_number = _number(lambda number: 0 < number < inf)
_parse_size = _number(lambda size: 0 <= size < inf)
_parse_fraction = _number(lambda fraction: 0 < fraction <= 1)


def _integer(least: int, most: float = inf) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not (text.isascii() and text.isdecimal() and least <= int(text) <= most):
            raise ValueError(text)
        return int(text)

    return parse


def _parse_old_fraction(text: str) -> float:
    if os.environ.get(MEMORY_FRACTION.name):  # jaxlib refuses both at once
        raise ValueError(text)
    return _parse_fraction(text)


_parse_port = _integer(1, 2**16 - 1)


def _parse_address(text: str) -> tuple[str, int | None]:
    """The host, which keeps the brackets of IPv6, and the port."""
    match = re.fullmatch(r"([\w.-]+|\[[0-9A-Fa-f:.]+(?:%[\w.-]+)?\])(?::(.*))?", text)
    if not match:
        raise ValueError(text)
    return match[1], None if match[2] is None else _parse_port(match[2])


def _parse_hosts(text: str) -> list[str]:
    """The hosts of a list of addresses, without their ports."""
    return [_parse_address(each)[0] for each in split_words(text)]


def _parse_folder(text: str) -> Path:
    if "://" in text:
        raise ValueError(text)
    return Path(text).expanduser()


def _parse_flags(text: str) -> list[str]:
    """The flags of XLA; the text may also be the name of a file of flags."""
    flags = text.split()
    for flag in flags:
        name, _, value = flag.partition("=")
        is_count = name == "--xla_force_host_platform_device_count"
        if not (name.startswith("--") or os.path.isfile(text)) or (is_count and not int(value) > 0):
            raise ValueError(text)
    return flags


# ------------------------------------------------------------------------------ of this package

_SECONDS = "give a number of seconds, such as 300"
KEEP_MEMORY = Variable("T5X_DIFFEQ_KEEP_MEMORY", _integer(0, 1), "give 0 or 1, or unset it")
CACHE = Variable("T5X_DIFFEQ_CACHE", _parse_folder, "give a folder of this machine")
CACHE_GIB = Variable("T5X_DIFFEQ_CACHE_GIB", _parse_size, "give a number of GiB, such as 100, or 0")
ARRIVAL_SECONDS = Variable("T5X_DIFFEQ_ARRIVAL_SECONDS", _parse_number, _SECONDS)
SILENCE_SECONDS = Variable("T5X_DIFFEQ_SILENCE_SECONDS", _parse_number, _SECONDS)
LEASE_SECONDS = Variable("T5X_DIFFEQ_LEASE_SECONDS", _parse_number, _SECONDS)
PARENT = Variable("T5X_DIFFEQ_PARENT", _integer(1), "unset it; a process sets it for its children")
SPARSE_CORE = Variable("T5X_DIFFEQ_SPARSE_CORE", _integer(0, 1), "give 0 or 1, or unset it")
COMBINE_MIB = Variable(
    "T5X_DIFFEQ_COMBINE_MIB", _integer(1, 2**20), "give a number of MiB, such as 64"
)

# ------------------------------------------------------------------------------ of JAX

# The new and the old name of one fraction. JAX uses its default for a fraction that it can't read.
MEMORY_FRACTION = Variable(
    "XLA_CLIENT_MEM_FRACTION", _parse_fraction, "give a fraction of a GPU's memory, such as 0.92"
)
_OLD_MEMORY_FRACTION = Variable(
    "XLA_PYTHON_CLIENT_MEM_FRACTION",
    _parse_old_fraction,
    f"give a fraction of a GPU's memory, such as 0.92, and only in {MEMORY_FRACTION.name}",
)
XLA_FLAGS = Variable(
    "XLA_FLAGS",
    _parse_flags,
    "give flags as --xla_force_host_platform_device_count=8, separated by spaces, or unset it",
)
CPU_DEVICES = Variable(
    "JAX_NUM_CPU_DEVICES", _integer(1), "give the number of CPU devices, or unset it"
)
OF_EVERY_VERB = (
    *(KEEP_MEMORY, CACHE, CACHE_GIB, ARRIVAL_SECONDS, SILENCE_SECONDS, LEASE_SECONDS, PARENT),
    *(SPARSE_CORE, COMBINE_MIB, MEMORY_FRACTION, _OLD_MEMORY_FRACTION, XLA_FLAGS, CPU_DEVICES),
)

_OF_LAUNCHERS = ("T5X_DIFFEQ_RESTARTS", "T5X_DIFFEQ_SECRETS")


def unknown_variables() -> list[str]:
    """A line for each variable with this package's prefix that nothing reads."""
    ours = "T5X_DIFFEQ_"
    known = [each.name for each in OF_EVERY_VERB if each.name.startswith(ours)]
    ends = [name.removeprefix(ours) for name in (*known, *_OF_LAUNCHERS)]
    given = [name.removeprefix(ours) for name in sorted(os.environ) if name.startswith(ours)]
    near = {end: get_close_matches(end, ends, n=2) for end in given if end not in ends}
    return [
        f"warning: nothing reads {ours}{end}; did you mean "
        f"{' or '.join(ours + each for each in meant)}?"
        for end, meant in near.items()
        if meant
    ]


# ------------------------------------------------------------------------------ of processes

_PORT = "give a port from 1 to 65535"
_ALONE = "or unset it to run a single process"
COORDINATOR_ADDRESS = Variable(
    "JAX_COORDINATOR_ADDRESS",
    _parse_address,
    f"give HOST, HOST:PORT or [IPV6]:PORT, with a port from 1 to 65535, {_ALONE}",
)
COORDINATOR_PORT = Variable("JAX_COORDINATOR_PORT", _parse_port, _PORT)
NUM_PROCESSES = Variable(
    "JAX_NUM_PROCESSES", _integer(1), f"give the number of processes, {_ALONE}"
)
PROCESS_ID = Variable("JAX_PROCESS_ID", _integer(0), f"give this process's number, {_ALONE}")
LOCAL_DEVICE_IDS = Variable(
    "JAX_LOCAL_DEVICE_IDS",
    lambda text: [*map(_integer(0), split_words(text))],
    "give the numbers of this process's devices, such as 0,1, or unset it",
)
JOB_COMPLETION_INDEX = Variable(
    "JOB_COMPLETION_INDEX", _integer(0), "Kubernetes sets it to the number of a pod; unset it"
)
SLURM_TASKS = Variable(
    "SLURM_STEP_NUM_TASKS",
    _integer(1),
    "srun sets it to the number of tasks; start the processes with srun, or unset it",
)
OPEN_MPI_SIZE = Variable(
    "OMPI_COMM_WORLD_SIZE",
    _integer(1),
    "mpirun sets it to the number of processes; start them with mpirun, or unset it",
)
TORCH_SIZE = Variable("WORLD_SIZE", _integer(1), "torchrun sets it; unset it")
TORCH_RANK = Variable("RANK", _integer(0), "torchrun sets it; unset it")

_BY_GOOGLE = "Google sets it on the hosts of a TPU; give"
TPU_HOSTS = tuple(
    Variable(name, _parse_hosts, f"{_BY_GOOGLE} their names, separated by commas")
    for name in ("TPU_PROCESS_ADDRESSES", "TPU_WORKER_HOSTNAMES")
)
TPU_WORKER_ID = Variable("TPU_WORKER_ID", _integer(0), f"{_BY_GOOGLE} the number of this host")
NUM_SLICES = Variable("MEGASCALE_NUM_SLICES", _integer(1), f"{_BY_GOOGLE} the number of slices")
SLICE_ID = Variable("MEGASCALE_SLICE_ID", _integer(0), f"{_BY_GOOGLE} the number of this slice")
SLICE_COORDINATOR = Variable(
    "MEGASCALE_COORDINATOR_ADDRESS", _parse_address, f"{_BY_GOOGLE} HOST or HOST:PORT"
)
OF_PROCESSES = (  # set for one of several processes; JOB_COMPLETION_INDEX also for one alone
    *(COORDINATOR_ADDRESS, NUM_PROCESSES, PROCESS_ID, SLURM_TASKS, OPEN_MPI_SIZE),
    *(TORCH_SIZE, TORCH_RANK),
)
