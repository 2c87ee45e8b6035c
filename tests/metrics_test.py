"""Metrics are cut back to the step continued from."""

import json

import pytest

from t5x_diffeq.system.errors import InputError
from t5x_diffeq.training.tracking.jsonl import JsonlWriter, read_metrics
from t5x_diffeq.training.tracking.trackers import open_writer


def test_later_and_half_written_lines_are_cut(tmp_path):
    path = tmp_path / "metrics.jsonl"
    (tmp_path / "anew").mkdir()
    whole = [json.dumps({"step": s, "train/loss": s / 10}) for s in (1, 2, 2, 3, 4)]
    path.write_text("\n".join(whole) + '\n{"step": 2, "tra')
    JsonlWriter(tmp_path, 2).write_scalars(3, {"train/loss": 9.0})
    first = JsonlWriter(tmp_path / "anew", 0)  # killed before its first checkpoint
    first.write_scalars(0, {"eval/loss": 5.0})
    assert JsonlWriter(tmp_path / "anew", 0).reports == 0
    assert read_metrics(tmp_path / "anew") == []
    found = [(line["step"], line["train/loss"]) for line in read_metrics(tmp_path)]
    assert found == [(1, 0.1), (2, 0.2), (2, 0.2), (3, 9.0)]


def test_event_files_begun_within_one_second_are_two(tmp_path, monkeypatch):
    """A run that is resumed at once; in a bucket the second would take the first one's place."""
    monkeypatch.setattr("tensorboardX.event_file_writer.time.time", lambda: 1e9)
    for step in (0, 1):
        with open_writer(tmp_path, step, ("tensorboard",)) as writer:
            writer.write_scalars(step + 1, {"train/loss": 1.0})
    assert len(list((tmp_path / "events").iterdir())) == 2


def test_a_folder_in_their_place_is_named(tmp_path):
    (tmp_path / "metrics.jsonl").mkdir()
    for use in (lambda: JsonlWriter(tmp_path, 2), lambda: read_metrics(tmp_path)):
        with pytest.raises(InputError, match=r"metrics.jsonl can't be read: Is a directory; move"):
            use()
