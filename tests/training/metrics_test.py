"""Metrics are cut back to the step continued from."""

import json
import resource
import time

import pytest

from t5x_diffeq.system import json_lines
from t5x_diffeq.system.errors import InputError
from t5x_diffeq.training.tracking import jsonl
from t5x_diffeq.training.tracking.jsonl import JsonlWriter, kinds_reported_at, read_metrics
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
    assert list(read_metrics(tmp_path / "anew")) == []
    found = [(line["step"], line["train/loss"]) for line in read_metrics(tmp_path)]
    assert found == [(1, 0.1), (2, 0.2), (2, 0.2), (3, 9.0)]


def test_lines_that_are_no_reports_are_left_out(tmp_path, capsys):
    """One of them in the middle of a run's file neither keeps it from going on nor is shown."""
    path = tmp_path / "metrics.jsonl"
    good = [{"step": s, "eval/loss": s / 10} for s in (1, 2, 3)]
    damaged = ["\0" * 9, "[]", '{"step": 2, "eval/lo', '{"step": "2", "eval/loss": 1}']
    damaged += [
        '{"step": 2, "eval/loss": null}',
        '{"eval/loss": 1}',
        '{"step": 2, "eval/loss": "1"}',
    ]
    lines = [json.dumps(good[0]), *damaged, *map(json.dumps, good[1:])]
    path.write_text("\n".join([*lines, ""]))
    assert list(read_metrics(tmp_path)) == list(read_metrics(tmp_path, "eval/loss")) == good
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2 and f"{path}, line 2: " in said[0] and "and 6 others" in said[0]
    assert list(read_metrics(tmp_path, "train/loss")) == []
    assert JsonlWriter(tmp_path, 2, 9).reports == 9  # only what follows step 2 is cut off
    assert list(read_metrics(tmp_path)) == good[:2]
    assert kinds_reported_at(tmp_path, 2) == ["eval", "step"]


@pytest.mark.parametrize("block", [1, 7, 1000])
def test_lines_from_the_end(tmp_path, monkeypatch, block):
    monkeypatch.setattr(json_lines, "_BLOCK", block)
    path = tmp_path / "lines"
    assert list(json_lines.last_lines(path)) == [] and json_lines.end_of_whole_lines(path) == 0
    path.write_bytes(b"one\n\nthree\nfo")
    found = [(13, b"fo"), (11, b"three\n"), (5, b"\n"), (4, b"one\n")]
    assert list(json_lines.last_lines(path)) == found
    assert json_lines.end_of_whole_lines(path) == 11


def test_a_long_file_is_neither_parsed_nor_held_whole(tmp_path, monkeypatch):
    """A resume parses the lines after its step, and a reader of evaluations parses those."""
    lines = [json.dumps({"step": s, "train/loss": 1.0}) for s in range(1, 5001)]
    lines.insert(2500, json.dumps({"step": 2500, "eval/loss": 2.0}))
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines, ""]))
    parsed = []

    def parse(line):
        parsed.append(line)
        return json.loads(line)

    monkeypatch.setattr(jsonl, "parse_json", parse)
    monkeypatch.setattr(json_lines, "parse_json_object", parse)
    assert kinds_reported_at(tmp_path, 4990) == ["step", "train"]
    assert JsonlWriter(tmp_path, 4990, 4991).reports == 4991
    assert len(parsed) < 50
    assert [line["step"] for line in read_metrics(tmp_path, "eval/loss")] == [2500]
    assert len(parsed) < 50
    assert next(read_metrics(tmp_path)) == {"step": 1, "train/loss": 1.0}


@pytest.mark.slow
def test_what_a_long_file_costs(tmp_path, capsys, whole):
    """With --whole, one of a million lines."""
    lines = 1_000_000 if whole else 20_000
    report = json.dumps({"step": 0, **{f"train/{n}": 1.2345678901 + n for n in range(10)}})
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for step in range(1, lines + 1):
            file.write(report.replace('"step": 0', f'"step": {step}') + "\n")
            if step % 1000 == 0:
                file.write(json.dumps({"step": step, "eval/loss": 3.0}) + "\n")

    def resume():
        kinds_reported_at(tmp_path, lines)
        assert JsonlWriter(tmp_path, lines).reports == lines + lines // 1000

    def read():
        assert len(list(read_metrics(tmp_path, "eval/loss"))) == lines // 1000

    def read_all():
        assert sum(1 for _ in read_metrics(tmp_path)) == lines + lines // 1000

    for work in (resume, read, read_all):
        seconds, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        work()
        seconds = time.process_time() - seconds
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**10
        assert grown < 64
        with capsys.disabled():
            print(f"\n{work.__name__}, {lines} lines: {seconds:.1f} CPU s, {grown:.0f} MiB more")


def test_event_files_begun_within_one_second_are_two(tmp_path, monkeypatch):
    """A run that is resumed at once; in a bucket the second would take the first one's place."""
    monkeypatch.setattr("tensorboardX.event_file_writer.time.time", lambda: 1e9)
    for step in (0, 1):
        with open_writer(tmp_path, step, ("tensorboard",)) as writer:
            writer.write_scalars(step + 1, {"train/loss": 1.0})
    assert len(list((tmp_path / "events").iterdir())) == 2


def test_a_folder_in_their_place_is_named(tmp_path):
    (tmp_path / "metrics.jsonl").mkdir()
    for use in (lambda: JsonlWriter(tmp_path, 2), lambda: list(read_metrics(tmp_path))):
        with pytest.raises(InputError, match=r"metrics.jsonl can't be read: Is a directory; move"):
            use()
