"""Checkpoints that are damaged in any way: what is restored is what was saved, or an older one."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from t5x_diffeq.errors import InputError, RunError
from t5x_diffeq.training import checkpoint as checkpoints_of
from t5x_diffeq.training import checksums
from t5x_diffeq.training.checkpoint import Checkpoints, restore_params
from t5x_diffeq.training.checkpoint_folder import MARKER, METADATA
from t5x_diffeq.training.metrics import MetricWriter, say_if_lost
from t5x_diffeq.training.progress import check_finite
from t5x_diffeq.training.state import TrainState

FINGERPRINT = "of the data"


def state_at(step):
    """A little train state, no two steps alike, some of it over two devices."""
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    split, whole = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("x",), ()))

    def array(*shape, sharding=split):
        values = np.random.default_rng(step).normal(size=shape).astype(np.float32)
        return jax.device_put(values, sharding)

    params = {"source": {"kernel": array(8, 4), "bias": array(6)}, "embedding": array(32, 4)}
    moments = jax.tree.map(lambda x: x * 2, params)
    return TrainState(jax.device_put(jnp.int32(step), whole), params, moments)


def abstract(state):
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A workdir with checkpoints 2, 4 and 6."""
    workdir = tmp_path_factory.mktemp("saved")
    with Checkpoints(workdir, keep=3) as checkpoints:
        for step in (2, 4, 6):
            checkpoints.save(step, state_at(step), FINGERPRINT, None, reports=step)
    return workdir


@pytest.fixture
def workdir(saved, tmp_path):
    """A copy of it."""
    return shutil.copytree(saved, tmp_path / "workdir")


def restored_step(workdir, **options):
    """What is restored, and that it is what was saved at that step."""
    with Checkpoints(workdir, keep=3, **options) as checkpoints:
        restored = checkpoints.restore(abstract(state_at(0)), FINGERPRINT)
    jax.tree.map(np.testing.assert_array_equal, restored.state, state_at(restored.step))
    assert restored.reports == restored.step
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
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def delete(path):
    path.unlink()


WAYS = (truncate, delete, zero, flip)
SAID_NOTHING_OF = (MARKER, METADATA)  # nothing is read from them


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


def test_every_file_damaged_in_every_way(workdir, capsys):
    """A run goes on with what was saved, and the damaged checkpoint is kept apart."""
    survived = 0
    for name, way in faults(workdir):
        capsys.readouterr()
        step = restored_step(workdir)
        told = capsys.readouterr().err
        if name.name in SAID_NOTHING_OF:
            assert step == 6, (name, way)
        else:
            assert step == 4, (name, way)
            assert told.count("\n") == 1 and "checkpoint 6 can't be read (" in told, (told, name)
            assert (workdir / "unreadable_checkpoints" / "6").is_dir()
        survived += 1
    assert survived >= 60
    print(f"survived {survived} of {survived} damaged files of a checkpoint, nothing lost")


def test_params_of_a_damaged_checkpoint(workdir):
    """`generate --checkpoint=6` and the like: the right parameters, or one line."""
    params = abstract(state_at(0).params)
    for name, way in faults(workdir):
        if name.name in SAID_NOTHING_OF:
            found, _ = restore_params(workdir, params, 6)
            jax.tree.map(np.testing.assert_array_equal, found, state_at(6).params)
            continue
        with pytest.raises(InputError, match=r"checkpoint 6 of .* can't be read: .* of 2, 4, 6"):
            restore_params(workdir, params, 6)
        assert (way, name) and restore_params(workdir, params, 4)[1] == 4


def test_checkpoints_without_checksums(workdir, capsys):
    """Those of before: said, and taken; a truncated or missing file is found all the same."""
    for folder in list(workdir.rglob(checksums.FOLDER)):
        shutil.rmtree(folder)
    assert restored_step(workdir) == 6
    assert "checkpoint 6 has no checksums, and is taken as it is" in capsys.readouterr().err
    for name, way in faults(workdir):
        if way in ("truncate", "delete"):
            assert restored_step(workdir) in (4, 6), (name, way)


def test_verification_can_be_switched_off(workdir):
    (data,) = (workdir / "checkpoints" / "6" / "state").glob("checksums/rest.json")
    data.unlink()
    assert restored_step(workdir, verify=False) == 6
    assert restored_step(workdir) == 4


@pytest.mark.parametrize("content", ["[]", "{}", "null", '{"step": 4, "fingerprint": "x"}', "{"])
def test_other_json_as_state_of_the_data(workdir, content):
    (workdir / "checkpoints" / "6" / "data" / "metadata").write_text(content)
    assert restored_step(workdir, verify=False) == 4


def test_all_damaged(workdir):
    for step in (2, 4, 6):
        flip(next((workdir / "checkpoints" / str(step)).rglob("manifest.ocdbt")))
    for _ in range(2):  # starting again begins nothing anew, and moves nothing
        with pytest.raises(RunError, match=r"no checkpoint in .* can be read \(of 6: state/"):
            restored_step(workdir)
    assert {p.name for p in (workdir / "checkpoints").iterdir()} == {"2", "4", "6"}


def test_other_files_of_the_right_kind(workdir):
    """Checkpoint 4 under the name of 6: each file is whole."""
    shutil.rmtree(workdir / "checkpoints" / "6")
    shutil.copytree(workdir / "checkpoints" / "4", workdir / "checkpoints" / "6")
    assert restored_step(workdir) == 4


@pytest.mark.parametrize("lost", [[MARKER], [MARKER, METADATA]])
def test_copied_without_the_mark(workdir, lost, capsys):
    """Later versions of Orbax may delete what isn't marked: it is marked anew."""
    for name in lost:
        for path in list(workdir.rglob(name)):
            path.unlink()
    assert restored_step(workdir) == 6
    assert capsys.readouterr().err.count(f"lacks {MARKER}, and is whole: marked anew") == 3
    assert all((workdir / "checkpoints" / step / MARKER).exists() for step in ("2", "4", "6"))


def test_saves_that_were_cut_off_are_deleted(workdir):
    shutil.copytree(
        workdir / "checkpoints" / "4", workdir / "checkpoints" / "8.orbax-checkpoint-tmp"
    )
    assert restored_step(workdir) == 6
    assert {p.name for p in (workdir / "checkpoints").iterdir()} == {"2", "4", "6"}


def test_a_disk_that_fills_up(saved, tmp_path, monkeypatch):
    """Orbax's thread fails: one line at the next look, and what was saved is there."""
    workdir = shutil.copytree(saved, tmp_path / "workdir")

    def full(*_):
        raise OSError(28, "No space left on device")

    with pytest.raises(RunError, match=r"checkpoint 8 can't be .*: No space left .* checkpoint 6$"):
        with Checkpoints(workdir, keep=3) as checkpoints, monkeypatch.context() as patch:
            patch.setattr(checksums, "save_sums", full)
            checkpoints.save(8, state_at(8), FINGERPRINT)
            checkpoints.manager.wait_until_finished  # noqa: B018
            checkpoints.save(10, state_at(10), FINGERPRINT)
    assert restored_step(workdir) == 6


def test_a_loss_that_is_not_finite_right_after_a_restore():
    nan = {"loss": float("nan")}
    with pytest.raises(RunError, match=r"checkpoint is suspect; move checkpoints/6 away"):
        check_finite(7, nan, 6, start=6)
    with pytest.raises(RunError, match=r"the last good checkpoint is 8"):
        check_finite(9, nan, 8, start=6)
    with pytest.raises(RunError, match=r"no checkpoint was saved yet"):
        check_finite(1, nan, None, start=0)


def test_metrics_that_were_cut(tmp_path, capsys):
    with MetricWriter(tmp_path, 0) as writer:
        for step in range(1, 9):
            writer.write(step, {"train/loss": 1.0})
        assert writer.reports == 8
    say_if_lost(tmp_path, 8, 8)
    say_if_lost(tmp_path, 4, 4)  # later lines count for nothing
    say_if_lost(tmp_path, 8, None)
    assert capsys.readouterr().err == ""
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:5]))
    say_if_lost(tmp_path, 8, 8)
    assert (
        "metrics.jsonl has 5 of the 8 lines that it had at checkpoint 8" in capsys.readouterr().err
    )
    path.unlink()
    say_if_lost(tmp_path, 8, 8)
    assert "has 0 of the 8 lines" in capsys.readouterr().err


def test_sums_are_of_every_file(saved):
    """But of those that Orbax writes when all is committed."""
    checkpoint = saved / "checkpoints" / "6"
    expected = checksums.expected_sums(checkpoint, checkpoints_of.ITEMS)
    unlisted = {str(name) for name in files_of(checkpoint)} - expected.keys()
    assert {name.rpartition("/")[2] for name in unlisted} == {MARKER, METADATA, "rest.json"}
    for item in checkpoints_of.ITEMS:
        assert json.loads((checkpoint / item / checksums.REST).read_text())
