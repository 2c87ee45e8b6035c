"""Trackers, read back with their own libraries; what fails or hangs there costs a run nothing."""

import json
import struct
import threading
import time

import numpy as np
import pytest
from helpers import metrics_of, setup_of, stop_after
from matplotlib.figure import Figure
from patience import patience

from t5x_diffeq.cli.train import train_to_end
from t5x_diffeq.config.config import Config
from t5x_diffeq.system.errors import InputError
from t5x_diffeq.training.hooks.watcher import WeightFigures
from t5x_diffeq.training.tracking import trackers
from t5x_diffeq.training.tracking.interface import BackgroundTracker, Tracker
from t5x_diffeq.training.tracking.jsonl import JsonlWriter, read_metrics
from t5x_diffeq.training.tracking.services import TensorBoardTracker
from t5x_diffeq.training.tracking.trackers import RunWriter, check_trackers, open_writer, render

IMAGE = np.arange(4 * 6 * 3, dtype=np.uint8).reshape(4, 6, 3)
BLOCK = 32 * 1024  # of W&B's file, in which no record header crosses a boundary


def write_all(writer, step):
    writer.write_scalars(step, {"train/loss": float(step), "train/mfu": np.float32(0.5)})
    writer.write_summaries(step, {"norms": np.arange(6.0).reshape(2, 3) + step})
    if isinstance(writer, RunWriter):
        writer.write_images(step, {"weights/path": IMAGE})
    writer.write_texts(step, {"sample/0": f"<a>\n  step {step}"})


def test_files_of_lines_are_cut_at_the_step(tmp_path):
    writer = JsonlWriter(tmp_path, 0)
    writer.write_hparams({"seed": 0, "path": None, "rules": ((1, None),)})
    for step in (1, 2, 3):
        write_all(writer, step)
    resumed = JsonlWriter(tmp_path, 2)
    assert resumed.reports == 2
    write_all(resumed, 4)
    resumed.close()
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2, 4]
    curves = [json.loads(line) for line in (tmp_path / "curves.jsonl").read_text().splitlines()]
    assert curves[1:] == [
        {"step": 2, "norms": [[2.0, 3.0, 4.0], [5.0, 6.0, 7.0]]},
        {"step": 4, "norms": [[4.0, 5.0, 6.0], [7.0, 8.0, 9.0]]},
    ]
    samples = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert [(line["step"], line["sample/0"][-1]) for line in samples] == [
        (1, "1"),
        (2, "2"),
        (4, "4"),
    ]
    described = json.loads((tmp_path / "hyperparameters.json").read_text())
    assert described == {"seed": 0, "path": None, "rules": [[1, None]]}


def events_of(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"tensors": 0, "images": 0})
    return events.Reload()


def test_tensorboard_reads_the_event_files(tmp_path):
    for start in (0, 2):  # the second continues at step 2
        with open_writer(tmp_path, start, ("tensorboard",)) as writer:
            writer.write_hparams({"model.num_steps": 6, "mesh.rules": (("vocab", None),)})
            for step in range(start + 1, start + 4):
                write_all(writer, step)
    events = events_of(tmp_path / "events")
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [
        (n, float(n)) for n in (1, 2, 3, 4, 5)
    ]
    assert [image.step for image in events.Images("weights/path")] == [1, 2, 3, 4, 5]
    assert (events.Images("weights/path")[0].height, events.Images("weights/path")[0].width) == (
        4,
        6,
    )
    (text,) = events.Tensors("sample/0/text_summary")[-1].tensor_proto.string_val
    assert text == b"    <a>\n      step 5\n"
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    content = events.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    values = HParamsPluginData.FromString(content).session_start_info.hparams
    assert values["model.num_steps"].number_value == 6
    assert values["mesh.rules"].string_value == "(('vocab', None),)"


def wandb_records(path):
    """The records of W&B's own file, a log in LevelDB's format."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, at, record = path.read_bytes(), 7, b""
    while at < len(content):
        left = BLOCK - at % BLOCK
        if left < 7:  # padding
            at += left
            continue
        size, kind = struct.unpack("<HB", content[at + 4 : at + 7])
        record += content[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield Record.FromString(record)
            record = b""


def wandb_runs(workdir):
    """Of each attempt, oldest first: the id, the config, and the rows."""
    import wandb

    wandb.teardown()  # its process then has written everything
    runs = []
    for path in sorted(workdir.glob("wandb/offline-run-*/*.wandb")):
        run_id, config, rows = None, {}, []
        for record in wandb_records(path):
            run_id = record.run.run_id or run_id
            config |= {i.key: json.loads(i.value_json) for i in record.config.update}
            if items := record.history.item:
                row = {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in items}
                rows.append(row)
        runs.append((run_id, config, rows))
    return runs


@pytest.fixture
def offline(monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")


def test_a_tracker_that_fails_ends_nothing(tmp_path, monkeypatch, capsys):
    def fail(*_):
        raise ConnectionError("no network")

    monkeypatch.setattr(TensorBoardTracker, "write_scalars", fail)
    with open_writer(tmp_path, 0, ("tensorboard",)) as writer:
        for step in (1, 2, 3):
            writer.write_scalars(step, {"train/loss": 1.0})
    assert len(list(read_metrics(tmp_path))) == 3
    said = capsys.readouterr().err
    assert said.count("warning:") == 1
    assert "tensorboard failed (ConnectionError: no network) and is disabled" in said


def test_a_tracker_that_hangs_ends_nothing(tmp_path, monkeypatch, capsys):
    forever = threading.Event()
    monkeypatch.setattr(TensorBoardTracker, "__init__", lambda *_: forever.wait())
    monkeypatch.setattr(trackers, "_SECONDS_TO_CLOSE", 0.2)
    began = time.monotonic()
    with open_writer(tmp_path, 0, ("tensorboard",)) as writer:
        for _ in range(20_000):  # more than can wait
            writer.trackers[0].call(lambda tracker: tracker.write_scalars(1, {}))
        writer.write_scalars(1, {"train/loss": 1.0})
    assert time.monotonic() - began < patience(10)
    assert len(list(read_metrics(tmp_path))) == 1
    said = capsys.readouterr().err
    assert said.count("tensorboard is too slow") == 1
    assert "tensorboard was not done in time" in said


def test_figures_are_drawn_in_another_thread(capsys):
    written, threads = {}, []

    class Images(Tracker):
        def write_images(self, step, images):
            written.update({(step, name): image for name, image in images.items()})

    def make():
        threads.append(threading.current_thread())
        figure = Figure(figsize=(3, 2), dpi=50)
        figure.subplots().plot([0, 1], [1, 0])
        return figure

    writer = RunWriter(None, [BackgroundTracker("images", Images)])
    for _ in range(2):
        writer.draw(5, "bad", lambda: render(None))
    writer.draw(5, "good", make)
    writer.close()
    (image,) = written.values()
    assert written.keys() == {(5, "good")}
    assert image.shape == (100, 150, 3) and image.dtype == np.uint8
    assert image[0, 0].tolist() == [255] * 3 and image.min() < 100
    assert threads[0] is not threading.main_thread()
    assert capsys.readouterr().err.count("the drawing of figures failed") == 1


def test_what_is_missing_is_said_before_the_run(small, monkeypatch, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    message = r"wandb needs the package wandb; .*python.* -m pip install -e '/.*\[trackers\]'"
    with pytest.raises(InputError, match=message):
        check_trackers(("tensorboard", "wandb"))
    small.train.figure_every = 5
    with pytest.raises(InputError, match=r"figure_every=5 needs the package matplotlib"):
        WeightFigures.check(Config.of(small), setup_of(small))
    small.train.trackers = ()
    with pytest.raises(InputError, match=r"figure_every=5 needs a tracker"):
        train_to_end(Config.of(small), tmp_path)
    with pytest.raises(InputError, match=r"can be tensorboard, wandb"):
        small.train.trackers = ("tensorbord",)
        Config.of(small)


@pytest.mark.slow
def test_wandb_without_an_account_is_said_before_the_run(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    import wandb

    wandb.teardown()  # of an earlier test, with its settings
    with pytest.raises(InputError, match=r"has no account here; run `wandb login`"):
        check_trackers(("wandb",))
    monkeypatch.setenv("WANDB_MODE", "offline")
    check_trackers(("wandb",))
    wandb.teardown()


@pytest.mark.slow
@pytest.mark.in_turns("trainings")
def test_a_run_with_everything_on_is_the_same_run(finished, tmp_path, offline):
    """Stopped and resumed, too: one run in each tracker, and bit for bit the metrics without."""
    config, workdir = finished
    config = config.copy_and_resolve_references()
    config.train.update(
        trackers=("tensorboard", "wandb"),
        sample_every=2,
        sample_prompts=("", "line"),
        figure_every=2,
    )
    run = tmp_path / "everything"
    assert stop_after(2, Config.of(config), run) == 42
    assert train_to_end(Config.of(config), run) == 0
    assert metrics_of(run) == metrics_of(workdir)
    times = [line for line in read_metrics(run) if "train/loss" in line]
    assert all(line["train/step_seconds"] > 0 for line in times)
    assert all(0.05 < line["train/host_memory_gib"] < 50 for line in times)

    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    assert [line["step"] for line in samples] == [0, 2, 4, 6]
    assert all(line["sample/1"].startswith("line") for line in samples)
    events = events_of(run / "events")
    names = {"weights/path", "weights/qk", "weights/ov", "weights/mlp"}
    assert set(events.Tags()["images"]) == names
    assert {e.step for e in events.Images("weights/path")} == {0, 2, 4, 6}
    first, second = wandb_runs(run)
    assert first[0] == second[0]
    assert first[1]["model.num_steps"] == 2 and first[1]["model/parameters"] > 1000
    losses = {row["step"]: row["train/loss"] for row in second[2] if "train/loss" in row}
    assert losses == {line["step"]: line["train/loss"] for line in times if line["step"] > 3}
