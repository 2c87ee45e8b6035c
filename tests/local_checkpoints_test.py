"""Local checkpoints: restored if they are whole and the run's own, else the workdir's are."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fault_checkpoints import FINGERPRINT, WAYS, abstract, name_run, state_at
from jax.sharding import NamedSharding, PartitionSpec

from t5x_diffeq.checkpoints import checksums
from t5x_diffeq.checkpoints.checkpoint import Checkpoints
from t5x_diffeq.checkpoints.stored import RunFacts, TrainState
from t5x_diffeq.system.errors import InputError


class LostError(Exception):
    """Ends a run as if it were killed, for its local checkpoints to stay."""


def open_both(folder, workdir="run", **options):
    named = name_run(folder / workdir)
    return Checkpoints(named, keep=9, local=str(folder / "local"), **options)


def save(folder, local=(3, 4, 5), of_workdir=(2,), workdir="run", state_of=state_at):
    """A run that saved at these steps and then was lost."""
    with pytest.raises(LostError), open_both(folder, workdir) as checkpoints:
        for step in sorted({*local, *of_workdir}):
            facts = RunFacts(FINGERPRINT, step + 1, reports=step)
            checkpoints.save(step, state_of(step), facts, locally=step in local)
        checkpoints.local.wait()
        raise LostError
    return checkpoints.local.folder


def restore(folder, like=None, workdir="run", **options):
    """The step that is restored, after a look at the whole content."""
    like = abstract(state_at(0)) if like is None else like
    with pytest.raises(LostError), open_both(folder, workdir, **options) as checkpoints:
        restored = checkpoints.restore(like, FINGERPRINT)
        raise LostError
    jax.tree.map(np.testing.assert_array_equal, restored.state, state_at(restored.step))
    assert jax.tree.map(lambda x: x.sharding, restored.state) == jax.tree.map(
        lambda x: x.sharding, like
    )
    assert restored.facts.reports == restored.step
    assert restored.batches_consumed == restored.step + 1
    return restored.step


def test_the_newest_of_either_tier(tmp_path, capsys):
    folder = save(tmp_path)
    assert sorted(path.name for path in folder.iterdir()) == ["4", "5"]  # the newest two
    assert restore(tmp_path) == 5
    assert f"checkpoint 5 is restored from {tmp_path / 'local'}" in capsys.readouterr().err
    save(tmp_path, local=(), of_workdir=(8,))
    assert restore(tmp_path) == 8
    assert "is restored from" not in capsys.readouterr().err


@pytest.mark.slow
def test_damage(tmp_path, capsys):
    """Every file in every way: the one before is read, with a warning."""
    save(tmp_path)
    count = 0
    for way in WAYS:
        folder = save(tmp_path, local=(6, 7), of_workdir=())
        names = sorted(path.relative_to(folder) for path in (folder / "7").rglob("*.*"))
        for name in names:
            save(tmp_path, local=(6, 7), of_workdir=())
            content = (folder / name).read_bytes()
            way(folder / name)
            if (folder / name).exists() and (folder / name).read_bytes() == content:
                continue  # zeros that were zeros before
            capsys.readouterr()
            assert restore(tmp_path) == 6, (name, way)
            told = capsys.readouterr().err
            assert "warning: local checkpoint 7 can't be read (process 0: " in told, (name, told)
            assert not (folder / "7").exists()  # the run will save it again
            count += 1
    assert count >= 30


def test_all_local_ones_damaged(tmp_path):
    folder = save(tmp_path)
    for path in folder.rglob("0.bin"):
        path.unlink()
    assert restore(tmp_path) == 2
    assert not any(folder.iterdir())


def test_damage_that_verification_does_not_look_for(tmp_path):
    """Without checksums, what can't be read is found all the same."""
    folder = save(tmp_path)
    path = folder / "5" / "arrays" / "1.bin"
    path.write_bytes(path.read_bytes()[:-4])
    assert restore(tmp_path, verify=False) == 4


def test_of_another_run(tmp_path, capsys):
    """Neither a run in another workdir, nor a later one in the same, takes them."""
    save(tmp_path)
    save(tmp_path, local=(), of_workdir=(2,), workdir="other")
    assert restore(tmp_path, workdir="other") == 2
    assert "of other runs; delete what no run needs" in capsys.readouterr().err
    (tmp_path / "run").rename(tmp_path / "elsewhere")
    save(tmp_path, local=(), of_workdir=(1,))
    assert restore(tmp_path) == 1


def test_parts_that_are_new(tmp_path):
    """A run that takes up averages goes on from its local checkpoint, without any."""
    save(tmp_path)
    wanted = abstract(state_at(0))
    with open_both(tmp_path) as checkpoints:
        found = checkpoints.restore(replace(wanted, averages=wanted.params), FINGERPRINT)
    assert found.step == 5
    assert found.state.averages is None


def test_of_another_mesh(tmp_path, capsys):
    """The workdir's are read onto any mesh."""
    save(tmp_path)
    mesh = jax.make_mesh((4,), ("x",), devices=jax.devices()[:4])
    split, whole = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("x",), ()))

    def on_mesh(x):
        splits = x.ndim and x.shape[0] % 4 == 0
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=split if splits else whole)

    assert restore(tmp_path, jax.tree.map(on_mesh, state_at(0))) == 2
    assert "saved from another mesh" in capsys.readouterr().err


def test_types_and_parts(tmp_path):
    """bfloat16 and scalars; each part once, though four devices hold two copies of it."""
    mesh = jax.make_mesh((2, 4), ("x", "y"))
    split = NamedSharding(mesh, PartitionSpec("x"))
    array = jax.device_put(jnp.arange(8, dtype=jnp.bfloat16), split)
    scalar = jax.device_put(jnp.int32(7), NamedSharding(mesh, PartitionSpec()))
    state = TrainState(scalar, {"a": array}, ())
    with open_both(tmp_path) as checkpoints:
        checkpoints.save(3, state, RunFacts(FINGERPRINT), locally=True)
        checkpoints.local.wait()
        sizes = {path.name: path.stat().st_size for path in checkpoints.local.folder.rglob("*.bin")}
        found = checkpoints.restore(abstract(state), FINGERPRINT)
    assert sizes == {"0.bin": 16, "1.bin": 4}
    jax.tree.map(np.testing.assert_array_equal, found.state, state)
    assert found.state.params["a"].sharding == split
    assert found.state.params["a"].dtype == jnp.bfloat16


def test_they_go_when_the_workdir_has_the_last(tmp_path):
    with open_both(tmp_path) as checkpoints:
        checkpoints.save(3, state_at(3), RunFacts(FINGERPRINT), locally=True)
    assert any((tmp_path / "local").rglob("3"))  # the workdir has nothing
    with open_both(tmp_path) as checkpoints:
        checkpoints.save(4, state_at(4), RunFacts(FINGERPRINT))
    assert not any((tmp_path / "local").iterdir())


def test_a_local_disk_that_is_full(tmp_path, monkeypatch, capsys):
    """A warning, nothing half-written, and the next one is tried again."""

    def full(*_):
        raise OSError(28, "No space left on device")

    with open_both(tmp_path) as checkpoints:
        with monkeypatch.context() as patch:
            patch.setattr(checksums, "save_sums", full)
            checkpoints.save(3, state_at(3), RunFacts(FINGERPRINT), locally=True)
            checkpoints.local.wait()
        assert not any(checkpoints.local.folder.iterdir())
        checkpoints.save(4, state_at(4), RunFacts(FINGERPRINT), locally=True)
        checkpoints.local.wait()
        assert checkpoints.local.steps() == [4]
    told = capsys.readouterr().err
    assert "warning: process 0: local checkpoint 3 can't be written to" in told
    assert "No space left on device; the run goes on" in told


@pytest.mark.parametrize("folder", ["gs://bucket/x", "/dev/null/x"])
def test_a_folder_that_is_none(tmp_path, folder):
    with pytest.raises(InputError, match=rf"train.local_checkpoints={folder} .*or None$"):
        Checkpoints(tmp_path, 1, local=folder)


# ------------------------------------------------------------------------ what a save costs


@pytest.mark.parametrize("local", [False, True])
def test_a_state_that_is_donated_right_after(tmp_path, local):
    """What is saved is the state of that step, whatever training writes into its buffers."""
    step = jax.jit(lambda state: jax.tree.map(lambda x: x + 1, state), donate_argnums=0)
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    split = NamedSharding(mesh, PartitionSpec("x"))
    params = {str(n): jax.device_put(jnp.full((512, 128), float(n)), split) for n in range(20)}
    state = TrainState(jax.device_put(1, NamedSharding(mesh, PartitionSpec())), params, ())
    like = abstract(state)
    with open_both(tmp_path) as checkpoints:
        before = [x.unsafe_buffer_pointer() for x in _buffers(state.params)]
        checkpoints.save(1, state, RunFacts(FINGERPRINT), locally=local)
        state = step(state)
        after = [x.unsafe_buffer_pointer() for x in _buffers(state.params)]
        assert before == after  # donated: nothing that is being written holds them
        for _ in range(20):
            state = step(state)
        jax.block_until_ready(state)
        wait = checkpoints.local.wait if local else checkpoints.manager.wait_until_finished
        wait()
        restored = checkpoints.restore(like, FINGERPRINT)
    assert restored.step == 1
    for n in range(20):
        np.testing.assert_array_equal(restored.state.params[str(n)], n)


def _buffers(state):
    return [shard.data for leaf in jax.tree.leaves(state) for shard in leaf.addressable_shards]
