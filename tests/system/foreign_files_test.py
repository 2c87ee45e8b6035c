"""Folders that may come from anybody: only regular files of their own are opened."""

import json
import os
import re
import shutil
import subprocess

import pytest

from t5x_diffeq.checkpoints.identity import run_of
from t5x_diffeq.checkpoints.restoring import restore_params
from t5x_diffeq.checkpoints.workdir import read_config
from t5x_diffeq.config import plugins
from t5x_diffeq.config.plugins import plugin_versions
from t5x_diffeq.data.manifest import load_lengths, read_manifest
from t5x_diffeq.data.shards import merge_shards
from t5x_diffeq.data.tokenizer_folder import load_tokenizer
from t5x_diffeq.experiments.commands import Commands
from t5x_diffeq.experiments.runs import read_results
from t5x_diffeq.hf.folder import TensorFiles, write_tensors
from t5x_diffeq.hf.from_pretrained import read_config_json
from t5x_diffeq.system import foreign_files
from t5x_diffeq.system.errors import InputError
from t5x_diffeq.system.foreign_files import check_inside, read_inside
from t5x_diffeq.training.branch import branch_off
from t5x_diffeq.training.history import read_events
from t5x_diffeq.training.hooks.profiler import Profiler
from t5x_diffeq.training.tracking.jsonl import read_metrics

SECRET = b"a key of this machine"
OUTCOME = {"run": "a", "verb": "evaluate", "seconds": 1.0}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "secret").write_bytes(SECRET)
    made = tmp_path / "theirs"
    made.mkdir()
    return made


def link_out(path):
    path.symlink_to((path.parents[1] / "secret").absolute())


FAULTS = {  # what a file is, and what is said of it
    "is a link to .*secret, outside of .*; if you trust it, replace it by a copy": link_out,
    "is a named pipe, where a file is needed; remove it": os.mkfifo,
    "is a link to /dev/zero, outside of": lambda path: path.symlink_to("/dev/zero"),
    "has 17 bytes, and may have at most 16; restore it": lambda path: path.write_bytes(b"1" * 17),
}
QUICK = pytest.mark.parametrize(("said", "spoil"), FAULTS.items(), ids=lambda value: "")


@QUICK
def test_only_regular_files_of_the_folder_are_read(folder, said, spoil):
    spoil(folder / "file")
    with pytest.raises(InputError, match=re.escape(str(folder / "file")) + " " + said):
        read_inside(folder / "file", 16)


def test_what_is_read(folder):
    with pytest.raises(FileNotFoundError):
        read_inside(folder / "file")
    (folder / "file").write_bytes(b"1" * 16)
    (folder / "link").symlink_to("file")
    assert read_inside(folder / "link", 16) == read_inside(folder / "file") == b"1" * 16
    (folder / "pointer").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    with pytest.raises(InputError, match=r"pointer is a pointer of Git LFS; run git lfs pull"):
        read_inside(folder / "pointer")
    (folder.parent / "mine").symlink_to(folder)  # a person names the folder
    assert read_inside(folder.parent / "mine" / "link") == b"1" * 16
    with pytest.raises(IsADirectoryError):
        read_inside(folder)
    (folder / "loop").symlink_to("loop")
    with pytest.raises(OSError, match="symbolic links"):
        read_inside(folder / "loop")


def test_a_cache_of_hugging_face(tmp_path):
    """Its snapshots are links to blobs of the same model, in a cache that may be linked itself."""
    model = tmp_path / "hub" / "models--a--b"
    snapshot = model / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (model / "blobs").mkdir()
    (model / "blobs" / "4567").write_text('{"model_type": "llama"}')
    (snapshot / "config.json").symlink_to("../../blobs/4567")
    (tmp_path / "cache").symlink_to("hub")
    for cache in ("hub", "cache"):
        named = tmp_path / cache / "models--a--b" / "snapshots" / "0123"
        assert read_config_json(named) == {"model_type": "llama"}
    (tmp_path / "secret").write_bytes(SECRET)
    (snapshot / "tokenizer.model").symlink_to("../../../../secret")
    with pytest.raises(InputError, match="outside of"):
        read_inside(snapshot / "tokenizer.model")


def test_folders_that_libraries_read(folder):
    (folder / "state").mkdir()
    (folder / "state" / "array").write_bytes(b"1")
    (folder / "state" / "same").symlink_to("array")
    check_inside(folder)
    check_inside(folder / "nothing")
    for said, spoil in list(FAULTS.items())[:3]:
        spoil(folder / "file")
        (folder / "file").rename(folder / "state" / "file")
        with pytest.raises(InputError, match=said):
            check_inside(folder / "state")
        (folder / "state" / "file").unlink()
    (folder / "again").symlink_to("state")
    with pytest.raises(InputError, match="again is a folder, where a file is needed; remove it"):
        check_inside(folder)
    (folder / "again").unlink()
    (folder / "linked").symlink_to("/etc")
    for named in (folder, folder / "linked"):
        with pytest.raises(InputError, match="linked is a link to /etc, outside of"):
            check_inside(named)


@pytest.fixture
def foreign(finished, tmp_path):
    """A whole run; beside it a file that is not its own."""
    (tmp_path / "secret").write_bytes(SECRET)
    return shutil.copytree(finished[1], tmp_path / "foreign")


def put(path, spoil):
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    spoil(path)


def to_secret(path):
    path.symlink_to(next(up / "secret" for up in path.parents if (up / "secret").exists()))


SPECIAL = {"a named pipe": os.mkfifo, "outside of": to_secret}


@pytest.mark.parametrize("said", SPECIAL)
@pytest.mark.parametrize("name", ["tokenizer/model", "checkpoints/6/state/manifest.ocdbt"])
def test_a_branch_copies_only_files_of_the_run(foreign, name, said, tmp_path):
    path = foreign / name
    put(path, SPECIAL[said])
    with pytest.raises(InputError, match=f"{name} is .*{said}"):
        branch_off(tmp_path / "b", foreign, None, None, {"train.total_steps": 9}, first=True)
    assert not any(each.read_bytes() == SECRET for each in (tmp_path / "b").rglob("[!.]*.model"))
    assert not (tmp_path / "b" / name).exists()


@pytest.mark.parametrize("name", ["tokenizer", "checkpoints/6", "checkpoints/6/state"])
def test_a_branch_copies_no_folder_that_a_link_leads_to(foreign, name, tmp_path):
    shutil.copytree(foreign / name, tmp_path / "others")
    put(foreign / name, lambda path: path.symlink_to(tmp_path / "others"))
    with pytest.raises(InputError, match=f"{name} is a link to .*others, outside of"):
        branch_off(tmp_path / "b", foreign, None, None, {"train.total_steps": 9}, first=True)
    assert not (tmp_path / "b" / "config.json").exists()


@pytest.mark.parametrize("said", SPECIAL)
def test_every_reader_of_a_workdir_refuses(foreign, said):
    readers = {
        "config.json": read_config,
        "metrics.jsonl": lambda run: list(read_metrics(run)),
        "history.jsonl": read_events,
        "checkpoints/6/state/manifest.ocdbt": lambda run: restore_params(run, {}),
        "checkpoints/6/data/metadata": lambda run: restore_params(run, {}),
        "data/0/lengths.npy": lambda run: load_lengths(run / "data" / "0" / "lengths.npy"),
        "data/0/manifest.json": lambda run: read_manifest(run / "data" / "0"),
        "run_id": lambda run: run_of(run),
        "profile": lambda run: Profiler._take_up_request(None, run / "profile"),
        "tokenizer/end_of_text.json": lambda run: load_tokenizer(run / "tokenizer"),
        "tokenizer/chat_template.jinja": lambda run: load_tokenizer(run / "tokenizer"),
    }
    for name, read in readers.items():
        put(foreign / name, SPECIAL[said])
        with pytest.raises(InputError, match=f"{name} is .*{said}"):
            read(foreign)
        (foreign / name).unlink()


def test_shards_are_merged_from_regular_files(folder):
    os.mkfifo(folder / "train-00000-of-00001.array_record")
    with pytest.raises(InputError, match=r"array_record is a named pipe"):
        merge_shards(folder, 1, {}, 0.0)


def test_what_identifies_a_package_is_of_regular_files(folder, monkeypatch):
    (folder / "theirs").mkdir()
    (folder / "theirs" / "__init__.py").write_text("")
    monkeypatch.chdir(folder)
    before = plugin_versions({"model.block": "theirs:Block"})
    plugins._identify.cache_clear()
    os.mkfifo(folder / "theirs" / "pipe.py")
    (folder / "theirs" / "endless.py").symlink_to("/dev/zero")
    assert plugin_versions({"model.block": "theirs:Block"}) == before
    plugins._identify.cache_clear()


@pytest.mark.parametrize("said", SPECIAL)
def test_every_reader_of_a_hugging_face_folder_refuses(folder, said):
    import numpy as np

    write_tensors(folder, iter([("a", np.ones(2))]))
    assert TensorFiles(folder).read("a", (2,)).tolist() == [1, 1]
    for name, read in (("model.safetensors", TensorFiles), ("config.json", read_config_json)):
        put(folder / name, SPECIAL[said])
        with pytest.raises(InputError, match=f"{name} is .*{said}"):
            read(folder)


def test_a_file_larger_than_the_memory(foreign, monkeypatch):
    monkeypatch.setattr(foreign_files.read_inside, "__defaults__", (2**10,))
    with (foreign / "config.json").open("ab") as file:
        file.truncate(2**40)
    with pytest.raises(InputError, match=rf"config\.json has {2**40} bytes, and may have at most"):
        read_config(foreign)


@pytest.mark.parametrize("said", ["it is a link; remove it", "it is no regular file; remove it"])
def test_a_sweep_appends_its_log_to_no_link_or_pipe(folder, said):
    log = folder / "run.log"
    if "link" in said:
        log.symlink_to(folder.parent / "secret")
    else:
        os.mkfifo(log)
    with Commands() as commands, pytest.raises(OSError, match=said):
        commands.run(["sh", "-c", "echo written >&2"], log)
    assert (folder.parent / "secret").read_bytes() == SECRET
    log.unlink()
    with Commands() as commands:
        commands.run(["sh", "-c", "echo written >&2"], log)
    assert log.read_text() == "written\n"


def test_results_of_a_sweep(folder):
    os.mkfifo(folder / "results.jsonl")
    with pytest.raises(InputError, match=r"results\.jsonl is a named pipe"):
        read_results(folder)
    (folder / "results.jsonl").unlink()
    (folder / "results.jsonl").write_text(json.dumps(OUTCOME) + "\n")
    assert read_results(folder) == {"a": OUTCOME}


def test_a_pipe_with_a_reader_is_no_log(folder):
    os.mkfifo(folder / "run.log")
    with subprocess.Popen(["cat", folder / "run.log"], stdout=subprocess.DEVNULL) as reader:
        with Commands() as commands, pytest.raises(OSError, match="it is no regular file"):
            commands.run(["true"], folder / "run.log")
        reader.kill()
