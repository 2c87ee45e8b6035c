"""Checkpoints of a little train state, and every way to damage their files."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from t5x_diffeq.checkpoints.checkpoint import Checkpoints
from t5x_diffeq.checkpoints.checkpoint_folder import MARKER
from t5x_diffeq.checkpoints.identity import new_id
from t5x_diffeq.checkpoints.stored import RunFacts, TrainState

FINGERPRINT = "of the data"


def state_at(step):
    """A little train state, no two steps alike, some of it over two devices."""
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    split, whole = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("x",), ()))

    def array(*shape):
        values = np.random.default_rng(step).normal(size=shape).astype(np.float32)
        return jax.device_put(values, split)

    params = {"source": {"kernel": array(8, 4), "bias": array(6)}, "embedding": array(32, 4)}
    moments = jax.tree.map(lambda x: x * 2, params)
    return TrainState(jax.device_put(jnp.int32(step), whole), params, moments)


def abstract(state):
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )


def name_run(workdir):
    """Gives a workdir a config with the id of a run, as its first step does, if it has none."""
    workdir.mkdir(parents=True, exist_ok=True)
    if not (workdir / "config.json").exists():
        (workdir / "config.json").write_text(json.dumps({"run_id": new_id()}))
    return workdir


def save_some(workdir):
    """A workdir with checkpoints 2, 4 and 6."""
    with Checkpoints(workdir, keep=3) as checkpoints:
        for step in (2, 4, 6):
            checkpoints.save(step, state_at(step), RunFacts(FINGERPRINT, reports=step))
    return workdir


def restore_step(workdir, **options):
    """What is restored, and that it is what was saved at that step."""
    with Checkpoints(workdir, keep=3, **options) as checkpoints:
        restored = checkpoints.restore(abstract(state_at(0)), FINGERPRINT)
    jax.tree.map(np.testing.assert_array_equal, restored.state, state_at(restored.step))
    assert restored.facts.reports == restored.step
    return restored.step


def files_of(checkpoint):
    return sorted(p.relative_to(checkpoint) for p in checkpoint.rglob("*") if p.is_file())


def truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def zero(path):
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 512] = bytes(len(content[middle : middle + 512]))
    path.write_bytes(content)


def flip(path):
    content = bytearray(path.read_bytes())
    if content:
        content[len(content) // 2] ^= 4
    path.write_bytes(content)


def delete(path):
    path.unlink()


WAYS = (truncate, delete, zero, flip)
SAID_NOTHING_OF = (MARKER, "_CHECKPOINT_METADATA")  # nothing is read from them


def faults(workdir):
    """Every file of checkpoint 6, damaged in every way; the workdir is made whole in between."""
    checkpoint = workdir / "checkpoints" / "6"
    whole = shutil.copytree(checkpoint, workdir.parent / "whole")
    for name in files_of(whole):
        for way in WAYS:
            shutil.rmtree(workdir / "unreadable_checkpoints", ignore_errors=True)
            shutil.rmtree(checkpoint, ignore_errors=True)
            shutil.copytree(whole, checkpoint)
            way(checkpoint / name)
            yield name, way.__name__
