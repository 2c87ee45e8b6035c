"""What a checkpoint holds, the train state and the facts of the run; and how it is written."""

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import ceil, isfinite, prod
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
from flax import struct
from jaxtyping import Array

from t5x_diffeq.checkpoints.checkpoint_folder import whole_steps
from t5x_diffeq.system.errors import failure_kind, is_infrastructure_failure, system_error_in
from t5x_diffeq.system.files import AnyPath, describe_error, is_in_bucket

CHUNK_BYTES = 256 * 10**6  # the most that a chunk of a stored array has
_MOST_CHUNKS = 16  # of a device's part of an array, over as few as `CHUNK_BYTES` allows
_FULL = "No space left on device"


@struct.dataclass
class TrainState:
    """Everything that training changes; also a tree of its shapes or shardings."""

    step: Any  # optimizer steps done, an int32 scalar
    params: Any  # the model's parameters, float32
    opt_state: Any  # the optimizer's state for the parts that train
    # the exponential moving averages of the parts that train; None: there are none
    averages: Any = None
    # the last steps, with which a step is compared to find spikes; None: spikes aren't detected
    recent: Any = None

    def with_spikes(self, count: Array) -> "TrainState":
        """The state of a run that has had `count` spikes."""
        if self.recent is None:
            return self
        spikes = jax.device_put(np.asarray(count, np.int32), self.recent.spikes.sharding)
        return replace(self, recent=replace(self.recent, spikes=spikes))

    def averaged_params(self) -> Any:
        """The parameters, with averages in place of the parts that train."""
        return {**self.params, **self.averages}


class RunFacts(NamedTuple):
    """What a checkpoint holds beside the train state; to store another fact, add it here.

    Values must be the same on all processes: values that differ between processes are gathered
    first (`processes.gather`).
    """

    fingerprint: str  # of the data
    # batches read, including batches whose steps a rollback undid; None: as many as steps
    drawn: int | None = None
    reports: int | None = None  # the number of lines of `metrics.jsonl`, if it is known
    eval_loss: float | None = None  # at this step, if it was evaluated
    # what each hook keeps, by the hook's name: an entry for each process
    hooks: dict[str, list] = {}  # noqa: RUF012
    position: dict | None = None  # in a stream of data; None: the number of batches is enough
    run_id: str | None = None  # filled in by `Checkpoints.save`; None in earlier versions

    def as_json(self, step: int) -> dict:
        """The facts as the checkpoint of `step` stores them."""
        finite = self.eval_loss is not None and isfinite(self.eval_loss)
        return {
            **self._asdict(),
            "step": step,
            "drawn": step if self.drawn is None else self.drawn,
            "eval_loss": self.eval_loss if finite else None,
        }

    @classmethod
    def of(cls, data: dict) -> "RunFacts":
        """The facts that a checkpoint stored; older checkpoints don't have all of them."""
        stored = {name: data[name] for name in cls._fields if name in data}
        return cls(**{"drawn": data["step"], **stored})


class RestoredCheckpoint(NamedTuple):
    """Where a run begins: at a checkpoint, or at its first step."""

    state: TrainState
    step: int = 0
    facts: RunFacts = RunFacts("")

    @property
    def batches_consumed(self) -> int:
        """The batches that were read."""
        return self.step if self.facts.drawn is None else self.facts.drawn


def parts_of(state: TrainState) -> dict[str, Any]:
    """The parts that a train state has, by name; parts that are None are left out."""
    return {name: part for name, part in vars(state).items() if part is not None}


# ------------------------------------------------------------------------------ writing


class FinishedSave(NamedTuple):
    """A checkpoint that is completely written."""

    step: int
    size: int  # bytes
    waited: float  # seconds that the training thread was blocked, also by the save before it
    seconds: float  # from the call of `save` to the end of writing

    def line(self) -> str:
        """`checkpoint 500 saved: 63 MB; training waited 0.02 s, written in 0.8 s`."""
        return (
            f"checkpoint {self.step} saved: {_format_bytes(self.size)}; training waited "
            f"{self.waited:.2f} s, written in {self.seconds:.1f} s"
        )


def _format_bytes(size: int) -> str:
    """A size such as `84 kB`, `63 MB`, `1.01 GB`."""
    for unit, name, digits in ((10**12, "TB", 2), (10**9, "GB", 2), (10**6, "MB", 0)):
        if size >= unit:
            return f"{size / unit:.{digits}f} {name}"
    return f"{size / 1000:.0f} kB"


def items_of(state: TrainState, data_state: dict) -> ocp.args.Composite:
    """The items of a checkpoint, as Orbax takes them.

    An array is cut into chunks of at most `CHUNK_BYTES`, however it is sharded, if its shape allows
    that (`_most_chunk_bytes`). A chunk is written and read as a whole, by one thread.
    """
    parts = parts_of(_copy_on_cpus(state))
    chunked = jax.tree.map(lambda x: ocp.SaveArgs(chunk_byte_size=_most_chunk_bytes(x)), parts)
    return ocp.args.Composite(
        state=ocp.args.PyTreeSave(parts, save_args=chunked), data=ocp.args.JsonSave(data_state)
    )


def _most_chunk_bytes(array: Array) -> int | None:
    """The most that a chunk of an array may have; None: each device's part is one chunk.

    Orbax's chunks divide a part evenly, dimension by dimension. A long dimension without a fitting
    divisor, such as one of prime length, would give millions of chunks of a few bytes.
    """
    shape = array.sharding.shard_shape(array.shape)
    least = ceil(prod(shape) * array.dtype.itemsize / CHUNK_BYTES)  # chunks
    fitting = range(least, _MOST_CHUNKS * least + 1)
    long = [length for length in shape if length >= least]
    if least <= 1 or all(any(length % n == 0 for n in fitting) for length in long):
        return CHUNK_BYTES
    return None


def _copy_on_cpus(state: TrainState) -> TrainState:
    """The state; on CPUs a copy of it.

    On CPUs, the NumPy arrays that Orbax writes would share the state's memory. Orbax holds them
    until all is written, and the next training step, which donates the state, would wait for that.
    """
    if jax.local_devices()[0].platform != "cpu":
        return state

    def copy(array: jax.Array) -> jax.Array:
        # Shard by shard: `device_put` of arrays of several processes would compile a program.
        shards = [shard.data for shard in array.addressable_shards]
        copies = jax.device_put(shards, [x.sharding for x in shards], may_alias=False)
        return jax.make_array_from_single_device_arrays(array.shape, array.sharding, copies)

    return jax.block_until_ready(jax.tree.map(copy, state))


@contextmanager
def explain_failure(folder: AnyPath, step: int | None, expected: Sequence[int]) -> Iterator[None]:
    """A context that turns what Orbax raises while it saves `step` into an error of one line.

    `expected` are the steps of the checkpoints that the run has saved or found in the folder.
    """
    try:
        yield
    except Exception as error:
        complete = [other for other in whole_steps(folder) if other != step]
        are_gone = bool(set(expected) - {step}) and not complete
        cause = "the folder was deleted while it was written" if are_gone else root_cause(error)
        kept = "earlier checkpoints are kept: " if complete else ""
        raise failure_kind(error)(
            f"checkpoint {step} can't be written to {folder}: "
            f"{_FULL if is_full(folder) else cause}; {kept}once this is fixed, the same command "
            f"continues at {f'checkpoint {complete[-1]}' if complete else 'the start'}"
        ) from error


def is_full(folder: AnyPath) -> bool:
    """Whether the disk has less than a MiB left.

    On a full disk, Orbax's threads may raise a secondary error such as "File exists".
    """
    if is_in_bucket(folder):
        return False
    existing = next(each for each in (folder, *folder.parents) if each.exists())
    return shutil.disk_usage(existing).free < 2**20


def root_cause(error: BaseException) -> str:
    """The cause of an error if that is a full disk or infrastructure, else the error; one line."""
    number, passes = system_error_in(str(error)), is_infrastructure_failure(error)
    text = os.strerror(number) if passes and number is not None else describe_error(error)
    for known in (_FULL, "Disk quota exceeded"):
        cause: BaseException | None = error
        while cause is not None:
            if known in str(cause):
                return known
            cause = cause.__cause__ or cause.__context__
    return text[:200]
