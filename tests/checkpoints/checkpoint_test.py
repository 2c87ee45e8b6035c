"""Checkpoints are verified before they are read; what can't be read is kept apart."""

import json
import math
import os
import shutil
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore
from fault_checkpoints import (
    FINGERPRINT,
    SAID_NOTHING_OF,
    abstract,
    delete,
    files_of,
    flip,
    name_run,
    restore_step,
    state_at,
)
from jax.sharding import NamedSharding, PartitionSpec
from patience import patience

from t5x_diffeq.checkpoints import checkpoint_folder, checksums, stored
from t5x_diffeq.checkpoints.checkpoint import Checkpoints
from t5x_diffeq.checkpoints.checkpoint_folder import check_path, count_arrays
from t5x_diffeq.checkpoints.identity import new_id, run_of
from t5x_diffeq.checkpoints.restoring import check_continues, find_step, restore_params
from t5x_diffeq.checkpoints.stored import RunFacts, TrainState
from t5x_diffeq.cli.train import train_to_end
from t5x_diffeq.config.config import Config
from t5x_diffeq.system.errors import InfrastructureError, InputError, RunError
from t5x_diffeq.training.hooks.spike_hook import not_finite_error
from t5x_diffeq.training.tracking.jsonl import JsonlWriter


@pytest.mark.parametrize("way", [delete, flip])
def test_a_damaged_checkpoint_is_kept_apart(workdir, way, capsys):
    """`faults_test.py` damages every file in every way."""
    way(next((workdir / "checkpoints" / "6" / "state" / "ocdbt.process_0" / "d").iterdir()))
    with pytest.raises(InputError, match=r"checkpoint 6 of .* can't be read: state/.* of 2, 4$"):
        restore_params(workdir, abstract(state_at(0).params))
    assert restore_params(workdir, abstract(state_at(0).params), 4)[1] == 4
    assert restore_step(workdir) == 4
    (told,) = capsys.readouterr().err.splitlines()
    assert "warning: checkpoint 6 can't be read (state/ocdbt.process_0/d/" in told
    assert (workdir / "unreadable_checkpoints" / "6").is_dir()


def test_verification_can_be_switched_off(workdir):
    (data,) = (workdir / "checkpoints" / "6" / "state").glob("checksums/rest.json")
    data.unlink()
    assert restore_step(workdir, verify=False) == 6
    assert restore_step(workdir) == 4


@pytest.mark.parametrize("content", ["[]", "{}", "null", '{"step": 4, "fingerprint": "x"}', "{"])
def test_other_json_as_state_of_the_data(workdir, content):
    (workdir / "checkpoints" / "6" / "data" / "metadata").write_text(content)
    assert restore_step(workdir, verify=False) == 4


def test_all_damaged(workdir):
    for step in (2, 4, 6):
        flip(next((workdir / "checkpoints" / str(step)).rglob("manifest.ocdbt")))
    for _ in range(2):  # starting again begins nothing anew, and moves nothing
        with pytest.raises(RunError, match=r"no checkpoint in .* can be read \(of 6: state/"):
            restore_step(workdir)
    assert {p.name for p in (workdir / "checkpoints").iterdir()} == {"2", "4", "6"}


def test_other_files_of_the_right_kind(workdir):
    """Checkpoint 4 under the name of 6: each file is whole."""
    shutil.rmtree(workdir / "checkpoints" / "6")
    shutil.copytree(workdir / "checkpoints" / "4", workdir / "checkpoints" / "6")
    assert restore_step(workdir) == 4


def test_saves_that_were_cut_off_are_deleted(workdir):
    shutil.copytree(
        workdir / "checkpoints" / "4", workdir / "checkpoints" / "8.orbax-checkpoint-tmp"
    )
    assert restore_step(workdir) == 6
    until = time.monotonic() + patience(20)  # Orbax deletes in the background
    while (left := {p.name for p in (workdir / "checkpoints").iterdir()}) != {"2", "4", "6"}:
        assert time.monotonic() < until, left
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("number", "raised", "reason"),
    [(5, InfrastructureError, "Input/output error;"), (13, RunError, "UNKNOWN: Error opening")],
)
def test_an_error_number_in_a_text_of_tensorstore(tmp_path, number, raised, reason):
    message = rf"checkpoint 2 can't be written to .*: {reason}"
    with pytest.raises(raised, match=message), stored.explain_failure(tmp_path, 2, ()):
        raise ValueError(f"UNKNOWN: Error opening \"zarr\" driver [os_error_code='{number}']")


@pytest.mark.parametrize("raised", [(28, "No space left on device"), (17, "File exists")])
def test_a_disk_that_fills_up(saved, tmp_path, monkeypatch, raised):
    """Orbax's thread fails: one line at the next look, and what was saved is there.

    Where the disk is full, another error is taken for a consequence of that.
    """
    workdir = shutil.copytree(saved, tmp_path / "workdir")

    def full(*_):
        raise OSError(*raised)

    monkeypatch.setattr(checksums, "save_sums", full)
    monkeypatch.setattr(stored, "is_full", lambda _: raised[0] != 28)
    message = r"checkpoint 8 can't be .*: No space left on device; .* at checkpoint 6$"
    with pytest.raises(RunError, match=message), Checkpoints(workdir, keep=3) as checkpoints:
        checkpoints.save(8, state_at(8), RunFacts(FINGERPRINT))
        checkpoints.save(10, state_at(10), RunFacts(FINGERPRINT))
    monkeypatch.undo()
    assert restore_step(workdir) == 6


def stored_chunks(checkpoint):
    """Shape, chunk shape and bytes per number of each array in a checkpoint, by name."""
    base = {"driver": "file", "path": f"{checkpoint / 'state'}/"}
    store = tensorstore.KvStore.open({"driver": "ocdbt", "base": base}).result()
    found = {}
    for key in store.list().result():
        if key.endswith(b".zarray"):
            metadata = json.loads(store[key])
            assert metadata["compressor"] is None, key  # mantissas are noise
            size = np.dtype(metadata["dtype"].replace("bfloat16", "u2")).itemsize
            found[key.decode()] = metadata["shape"], metadata["chunks"], size
    return found


def test_chunks_have_a_largest_size(tmp_path, monkeypatch):
    """However an array is split; 61 has no divisors. What was saved is read with any limit."""
    mesh = jax.make_mesh((2, 2), ("x", "y"), devices=jax.devices()[:4])
    arrays = {
        "whole": (np.arange(64 * 48, dtype=np.float32).reshape(64, 48), ()),
        "rows": (np.arange(64 * 48, dtype=np.float32).reshape(64, 48), ("x",)),
        "both": (np.arange(128 * 96, dtype=np.float32).reshape(128, 96), ("x", "y")),
        "half": (np.arange(61 * 64).reshape(61, 64).astype(jnp.bfloat16), (None, "y")),
        "small": (np.arange(8, dtype=np.float32), ()),
    }
    params = {
        name: jax.device_put(values, NamedSharding(mesh, PartitionSpec(*axes)))
        for name, (values, axes) in arrays.items()
    }
    state = TrainState(jax.device_put(jnp.int32(3)), params, {})
    assert stored.CHUNK_BYTES <= 256 * 2**20
    monkeypatch.setattr(stored, "CHUNK_BYTES", 4096)
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(3, state, RunFacts(FINGERPRINT))
    monkeypatch.undo()
    found = stored_chunks(tmp_path / "checkpoints" / "3")
    assert {f"params.{name}/.zarray" for name in arrays} < found.keys()
    for name, (_, chunk, itemsize) in found.items():
        assert math.prod(chunk) * itemsize <= 4096, name
    shape, chunk, _ = found["params.rows/.zarray"]
    assert shape[0] // chunk[0] * (shape[1] // chunk[1]) > 2  # smaller than a device's part
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        restored = checkpoints.restore(abstract(state), FINGERPRINT)
    jax.tree.map(np.testing.assert_array_equal, restored.state, state)


@pytest.mark.parametrize(
    ("shape", "is_cut"),
    [
        ((4096, 2), True),
        ((1009,), True),  # it is small enough
        ((4099,), False),  # a prime number, which would be cut into single elements
        ((4099, 2), False),
        ((2, 4096), True),
        ((29 * 173, 1), False),  # 5 parts or more: 29 are too many
    ],
)
def test_no_array_is_cut_into_crumbs(monkeypatch, tmp_path, shape, is_cut):
    monkeypatch.setattr(stored, "CHUNK_BYTES", 4096)
    monkeypatch.setattr(stored, "_MOST_CHUNKS", 4)
    values = np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
    state = TrainState(jnp.int32(1), {"w": jnp.asarray(values)}, {})
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(1, state, RunFacts(FINGERPRINT))
        checkpoints.wait()
        restored = checkpoints.restore(abstract(state), FINGERPRINT)
    np.testing.assert_array_equal(restored.state.params["w"], values)
    _, chunk, itemsize = stored_chunks(tmp_path / "checkpoints" / "1")["params.w/.zarray"]
    size = math.prod(chunk) * itemsize
    assert (1024 <= size <= 4096) if is_cut else size == values.nbytes


def test_what_orbax_gets_shares_no_memory_with_the_state():
    """It is read while the next step writes to the arrays of the state."""

    def pointers(tree):
        shards = (x.addressable_shards for x in jax.tree.leaves(tree))
        return {shard.data.unsafe_buffer_pointer() for each in shards for shard in each}

    state = state_at(2)
    given = stored.items_of(state, {})["state"].item
    assert not pointers(given) & pointers(state)


def test_a_loss_that_is_not_finite_right_after_a_restore():
    said = [
        str(not_finite_error(step, ["loss is nan"], last, start, None))
        for step, last, start in [(7, 6, 6), (9, 8, 6), (1, None, 0)]
    ]
    assert "checkpoint is suspect; move checkpoints/6 away" in said[0]
    assert "the last good checkpoint is 8" in said[1]
    assert "no checkpoint was saved yet" in said[2]


def test_metrics_that_were_cut(tmp_path, capsys):
    writer = JsonlWriter(tmp_path, 0)
    for step in range(1, 9):
        writer.write_scalars(step, {"train/loss": 1.0})
    assert writer.reports == 8
    for step, expected in ((8, 8), (8, None), (7, 7)):  # later lines count for nothing
        JsonlWriter(tmp_path, step, expected)
    assert capsys.readouterr().err == ""
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:5]))
    JsonlWriter(tmp_path, 8, 8)
    assert (
        "metrics.jsonl has 5 of the 8 lines that it had at checkpoint 8" in capsys.readouterr().err
    )
    path.unlink()
    JsonlWriter(tmp_path, 8, 8)
    assert "has 0 of the 8 lines" in capsys.readouterr().err


def test_checkpoints_that_are_deleted_while_the_run_saves(tmp_path, monkeypatch):
    """`rm -rf checkpoints/`: the next save makes the folder; one on its way ends the run."""
    folder = tmp_path / "checkpoints"
    with Checkpoints(tmp_path, 2) as checkpoints:
        for step in (2, 4):
            checkpoints.save(step, state_at(step), RunFacts(FINGERPRINT))
            checkpoints.wait()
            shutil.rmtree(folder)
        checkpoints.save(6, state_at(6), RunFacts(FINGERPRINT, reports=6))
        checkpoints.wait()
        assert restore_step(tmp_path) == 6

        def fail():
            shutil.rmtree(folder)
            raise ValueError("a part is missing")

        with monkeypatch.context() as patch, pytest.raises(RunError) as raised:
            patch.setattr(checkpoints.manager, "check_for_errors", fail)
            checkpoints.check()
    assert str(raised.value) == (
        f"checkpoint 6 can't be written to {folder}: the folder was deleted while it was written; "
        "once this is fixed, the same command continues at the start"
    )


def test_sums_are_of_every_file(saved):
    """But of those that Orbax writes when all is committed."""
    checkpoint = saved / "checkpoints" / "6"
    expected = checksums.expected_sums(checkpoint)
    unlisted = {str(name) for name in files_of(checkpoint)} - expected.keys()
    assert {name.rpartition("/")[2] for name in unlisted} == {*SAID_NOTHING_OF, "rest.json"}
    for item in checksums.ITEMS:
        assert json.loads((checkpoint / item / checksums.REST).read_text())


@pytest.mark.slow
def test_how_long_training_waits(tmp_path, capsys, whole):
    """Each save is before a step that donates the state; with --whole, of the README's 1 GB."""
    rng = np.random.default_rng(0)
    arrays = {
        str(n): rng.standard_normal((2048, 2048), np.float32) for n in range(60 if whole else 15)
    }
    state = TrainState(jax.device_put(0), jax.device_put(arrays), {})
    next_state = jax.jit(lambda state: jax.tree.map(lambda x: x + 1, state), donate_argnums=0)
    state, after = jax.block_until_ready(next_state(state)), []
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        for step in range(1, 4):
            checkpoints.save(step, state, RunFacts(FINGERPRINT))
            started = time.perf_counter()
            state = jax.block_until_ready(next_state(state))
            after.append(time.perf_counter() - started)
            checkpoints.manager.wait_until_finished()
    saves = checkpoints.finished_saves()
    assert [save.step for save in saves] == [1, 2, 3]
    assert max(after) < max(save.seconds for save in saves)  # the step doesn't wait for them
    with capsys.disabled():
        print(f"\n{saves[0].size / 1e9:.2f} GB in files; training waited", end=" ")
        print(", ".join(f"{save.waited:.2f}" for save in saves), end=" s; written in ")
        print(", ".join(f"{save.seconds:.1f}" for save in saves), end=" s; the step after took ")
        print(", ".join(f"{seconds:.2f}" for seconds in after), "s")


@pytest.mark.slow
def test_what_checksums_cost(tmp_path, capsys, whole):
    """With --whole, of the README's 1 GB."""
    gigabytes = 1 if whole else 0.25
    content = os.urandom(10**6) * int(125 * gigabytes)
    for number in range(8):
        (tmp_path / str(number)).write_bytes(content)
    seconds, busy = time.perf_counter(), time.process_time()
    sums = checksums.sums_of(tmp_path, checksums.names_in(tmp_path))
    seconds, busy = time.perf_counter() - seconds, time.process_time() - busy
    assert len(sums) == 8 and len(set(sums.values())) == 1
    assert busy < 5 * gigabytes
    with capsys.disabled():
        print(f"\nchecksums of {gigabytes} GB: {seconds:.2f} s, {busy:.2f} s of a core")


@pytest.mark.parametrize("name", ["run[1]", "run*", "a?/run"])
def test_a_path_in_which_orbax_would_lose_the_checkpoints(small, tmp_path, name):
    """It looks for their parts by a glob that begins with the path."""
    with pytest.raises(InputError, match=r"choose a --workdir without \[, \* and \?"):
        train_to_end(Config.of(small), tmp_path / name)
    assert not (tmp_path / name).exists()


def test_a_first_save_that_cannot_be_found_again_ends_the_run(tmp_path, monkeypatch):
    counted = []

    def count(folder):
        counted.append(folder)
        return 3

    monkeypatch.setattr(checkpoint_folder, "count_arrays", count)
    with (
        pytest.raises(RunError, match=r"checkpoint 2 .* can't be read: 3 of its 7 arrays"),
        Checkpoints(tmp_path, keep=2) as checkpoints,
    ):
        checkpoints.save(2, state_at(2), RunFacts(FINGERPRINT))
    assert len(counted) == 1
    monkeypatch.undo()
    assert count_arrays(tmp_path / "checkpoints" / "2") == 7
    assert count_arrays(tmp_path / "checkpoints" / ".." / "checkpoints" / "2") == 7


def test_a_folder_that_holds_nothing_is_set_aside(workdir):
    (workdir / "checkpoints" / "20").mkdir()
    assert restore_step(workdir) == 6
    assert (workdir / "unreadable_checkpoints" / "20").exists()


def test_parameters_of_another_width_are_refused_by_name(workdir):
    other = abstract(state_at(0))
    kernel = other.params["source"]["kernel"]
    other.params["source"]["kernel"] = jax.ShapeDtypeStruct((8, 5), kernel.dtype)
    with pytest.raises(InputError, match=r"has \(8, 4\) for the parameter source/kernel, but t"):
        restore_params(workdir, other.params, 6)


def test_a_folder_that_is_a_link_to_nowhere(tmp_path):
    (tmp_path / "checkpoints").symlink_to("checkpoints")
    with pytest.raises(InputError, match="is a link to checkpoints, which is not a folder"):
        check_path(tmp_path)
    (tmp_path / "checkpoints").unlink()
    (tmp_path / "scratch").mkdir()
    (tmp_path / "checkpoints").symlink_to("scratch")
    check_path(tmp_path)


def test_every_fact_of_a_run_is_stored():
    """A field alone is enough to store another one."""
    facts = RunFacts("f", 7, 3, 0.5, {"watch": [1, 2]}, {"row": 9}, "run")
    assert all(value != RunFacts("")._asdict()[name] for name, value in facts._asdict().items())
    assert RunFacts.of(facts.as_json(4)) == facts
    assert RunFacts.of({"step": 4, "fingerprint": "f"}) == RunFacts("f", 4)
    assert RunFacts("f", eval_loss=float("nan")).as_json(4)["eval_loss"] is None


# ------------------------------------------------------------------- whose a checkpoint is


@pytest.fixture
def siblings(tmp_path):
    """The workdirs of two runs of a sweep, each with its checkpoint 2."""
    workdirs = [name_run(tmp_path / name) for name in ("mine", "theirs")]
    for workdir in workdirs:
        save_step(workdir, 2)
    return workdirs


def save_step(workdir, step):
    with Checkpoints(workdir, keep=3) as checkpoints:
        checkpoints.save(step, state_at(step), RunFacts(FINGERPRINT))


def test_a_checkpoint_of_a_sibling_run_is_refused(siblings):
    """To resume, whatever its step, and to be read by a verb; the message names both runs."""
    mine, theirs = siblings
    for workdir in siblings:
        check_continues(workdir)
    save_step(theirs, 4)
    copied = shutil.copytree(theirs / "checkpoints" / "4", mine / "checkpoints" / "4")
    runs = (
        f"was made by another run, {run_of(theirs)}, and the workdir belongs to run {run_of(mine)};"
    )
    for refused in (
        lambda: check_continues(mine),
        lambda: check_continues(mine, 4),
        lambda: restore_params(mine, abstract(state_at(0).params)),
        lambda: find_step(mine, 4),
    ):
        with pytest.raises(InputError, match=f"checkpoint {copied} {runs} remove that folder"):
            refused()
    assert find_step(mine, 2) == 2
    shutil.rmtree(copied)
    check_continues(mine)
    (mine / "config.json").write_text("{}")
    with pytest.raises(InputError, match="a run of an earlier version, which has no id"):
        check_continues(mine)
    (mine / "config.json").write_text('{"run_id": [5]}')
    with pytest.raises(InputError, match=r"the workdir belongs to run \[5\]; remove"):
        check_continues(mine)


def test_checkpoints_and_runs_of_earlier_versions_have_no_id(siblings, tmp_path):
    mine, _ = siblings
    facts = mine / "checkpoints" / "2" / "data" / "metadata"
    before = json.loads(facts.read_text())
    facts.write_text(json.dumps({key: x for key, x in before.items() if key != "run_id"}))
    check_continues(mine)
    (mine / "config.json").write_text("{}")
    check_continues(mine)
    (mine / "run_id").write_text("of its local checkpoints")
    with Checkpoints(mine, keep=1) as checkpoints:
        assert checkpoints.run_id == "of its local checkpoints"


def test_a_verb_reads_no_checkpoint_under_the_number_of_another(siblings):
    mine, _ = siblings
    shutil.copytree(mine / "checkpoints" / "2", mine / "checkpoints" / "10")
    with pytest.raises(InputError, match="checkpoints/10 was made at step 2; rename its folder"):
        find_step(mine, None)
    assert find_step(mine, 2) == 2


def test_a_branch_takes_the_checkpoint_that_it_begins_with(siblings, tmp_path):
    mine, theirs = siblings
    branch = name_run(tmp_path / "branch")
    (branch / "config.json").write_text(json.dumps({"run_id": new_id(run_of(mine), 2)}))
    shutil.copytree(mine / "checkpoints" / "2", branch / "checkpoints" / "2")
    check_continues(branch)
    save_step(mine, 4)
    for source, step in ((theirs, 2), (mine, 4)):
        shutil.rmtree(branch / "checkpoints" / str(step), ignore_errors=True)
        shutil.copytree(source / "checkpoints" / str(step), branch / "checkpoints" / str(step))
        with pytest.raises(InputError, match="was made by another run"):
            check_continues(branch)
        shutil.rmtree(branch / "checkpoints" / str(step))
