"""Metrics are cut back to the step continued from."""

import json

from t5x_diffeq.training.metrics import MetricWriter, read_metrics


def test_later_and_half_written_lines_are_cut(tmp_path):
    path = tmp_path / "metrics.jsonl"
    (tmp_path / "anew").mkdir()
    whole = [json.dumps({"step": s, "train/loss": s / 10}) for s in (1, 2, 2, 3, 4)]
    path.write_text("\n".join(whole) + '\n{"step": 2, "tra')
    with MetricWriter(tmp_path, 2) as writer:
        writer.write(3, {"train/loss": 9.0})
    with MetricWriter(tmp_path / "anew", 0) as writer:  # killed before its first checkpoint
        writer.write(0, {"eval/loss": 5.0})
    with MetricWriter(tmp_path / "anew", 0):
        assert read_metrics(tmp_path / "anew") == []
    found = [(line["step"], line["train/loss"]) for line in read_metrics(tmp_path)]
    assert found == [(1, 0.1), (2, 0.2), (2, 0.2), (3, 9.0)]
