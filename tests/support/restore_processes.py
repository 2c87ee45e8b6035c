r"""Two processes that save and restore a little state together, in a script of a test.

    python launch/local_processes.py --devices_per_process=2 -- \
      python tests/support/restore_processes.py DIR [SECONDS]

What each process found goes to DIR/<process>.json. With SECONDS, each prepares something for so
long.
"""

import json
import os
import shutil
import sys
import time
import traceback
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import tensorstore
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from t5x_diffeq.checkpoints import checksums
from t5x_diffeq.checkpoints.checkpoint import Checkpoints
from t5x_diffeq.checkpoints.stored import RunFacts, TrainState
from t5x_diffeq.cluster import processes
from t5x_diffeq.system.errors import InfrastructureError

FINGERPRINT = "of the data"


def kernel_of(step):
    return np.random.default_rng(step).normal(size=(512, 128)).astype(np.float32)


def state_of(step, make):
    """The state of a step, whose kernel is split; `make(values, sharding)` makes each array."""
    mesh = jax.make_mesh((len(jax.devices()),), ("fsdp",), axis_types=(AxisType.Auto,))
    whole, split = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((), ("fsdp",)))
    kernel = make(kernel_of(step), split)
    return TrainState(make(np.asarray(step, np.int32), whole), {"kernel": kernel}, {})


def array(values, sharding):
    return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])


def shape(values, sharding):
    return jax.ShapeDtypeStruct(values.shape, values.dtype, sharding=sharding)


def is_right(state):
    """Whether every part that this process holds has the bits that were saved, in its place."""
    kernel = kernel_of(int(state.step))
    shards = state.params["kernel"].addressable_shards
    return all(np.array_equal(shard.data, kernel[shard.index]) for shard in shards)


def bytes_read():
    """The bytes of arrays that TensorStore has read from files."""
    name = "/tensorstore/kvstore/file/bytes_read"
    metrics = tensorstore.experimental_collect_matching_metrics(name)
    return sum(value["value"] for metric in metrics for value in metric["values"])


def restore(workdir, **options):
    """What came of it: the step and how many bytes were read, or the error."""
    before = bytes_read()
    with Checkpoints(workdir, keep=9, **options) as checkpoints:
        try:
            found = checkpoints.restore(state_of(0, shape), FINGERPRINT)
        except InfrastructureError as error:
            return {"error": str(error)}
    read = bytes_read() - before
    return {"step": found.step, "right": is_right(found.state), "read": read}


def own_view(workdir, process):
    """The workdir as this process sees it: `process` lacks a file of checkpoint 4."""
    if jax.process_index() != process:
        return workdir
    view = workdir.with_name(f"view_of_{process}")
    shutil.copytree(workdir, view)
    files = (view / "checkpoints" / "4" / "state" / "ocdbt.process_0" / "d").iterdir()
    max(files, key=lambda file: file.stat().st_size).unlink()
    return view


def refuse(*_):
    raise PermissionError(13, "Permission denied")


def restore_in_all_ways(folder):
    """What comes of each fault, by its name."""
    first, workdir, found = jax.process_index() == 0, folder / "run", {}
    with Checkpoints(workdir, keep=9) as checkpoints:
        for step in (2, 4):
            checkpoints.save(step, state_of(step, array), RunFacts(FINGERPRINT))
    found["unverified"] = restore(workdir, verify=False)
    for process in (0, 1):
        found[f"{process} lacks a file"] = restore(own_view(workdir, process))
    view = workdir.with_name("view_of_0") if first else workdir
    found["0 lacks a file, unverified"] = restore(view, verify=False)
    found["1 sees nothing"] = restore(workdir if first else workdir.with_name("nowhere"))
    sums_of = checksums.sums_of
    if not first:
        checksums.sums_of = refuse
    found["1 lacks a permission"] = restore(workdir)
    checksums.sums_of = sums_of
    if first:
        path = max((workdir / "checkpoints" / "4" / "state").rglob("d/*"))
        path.write_bytes(bytes(path.stat().st_size))
    processes.wait_for_all("the checkpoint is damaged")
    found["damaged"] = restore(workdir)
    return found


def wait_long(seconds):
    """Each process prepares something for longer than a collective of the devices may take."""
    total = jax.jit(jnp.sum, out_shardings=NamedSharding(_mesh(), PartitionSpec()))
    ones = jax.make_array_from_callback(
        (2,), NamedSharding(_mesh(), PartitionSpec("x")), lambda _: np.ones(1, np.float32)
    )
    before = float(total(ones))
    processes.run_in_turn(lambda first: time.sleep(seconds), "something is prepared")
    return {"before": before, "after": float(total(ones))}


def _mesh():
    return jax.make_mesh((len(jax.devices()),), ("x",), axis_types=(AxisType.Auto,))


def main(folder, seconds=None):
    processes.initialise()
    found = wait_long(float(seconds)) if seconds else restore_in_all_ways(Path(folder))
    (Path(folder) / f"{jax.process_index()}.json").write_text(json.dumps(found))
    processes.wait_for_all("all is written")
    processes.peers.leave()


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except Exception:
        traceback.print_exc()
        os._exit(1)  # an orderly exit would wait for the other process
