"""Metrics to disk: a line of JSON per report, and TensorBoard event files."""

import json
import os
from pathlib import Path

import jax
from tensorboardX import SummaryWriter

from t5x_diffeq.files import write_whole

METRICS_FILE = "metrics.jsonl"


class MetricWriter:
    """Appends reports to a workdir; only process 0 writes.

    Every line reaches the disk before `write` returns. A checkpoint of step s is saved after the
    lines of step s, so a run that is killed and resumed leaves the lines of one never disturbed.

    Args:
      workdir: where.
      step: the step continued from; lines after it are cut off. 0 begins anew: all are.
    """

    def __init__(self, workdir: Path, step: int):
        self.file = self.events = None
        if jax.process_index() != 0:
            return
        cut_back(workdir / METRICS_FILE, step if step > 0 else -1)
        self.file = (workdir / METRICS_FILE).open("a", encoding="utf-8")
        self.events = SummaryWriter(str(workdir / "events"), purge_step=step + 1)

    def write(self, step: int, values: dict[str, float]) -> None:
        """One report of `values` at `step`."""
        if self.file is None:
            return
        self.file.write(json.dumps({"step": step, **values}) + "\n")
        self.file.flush()
        os.fsync(self.file.fileno())
        for name, value in values.items():
            self.events.add_scalar(name, value, step)

    def __enter__(self) -> "MetricWriter":
        return self

    def __exit__(self, *exception: object) -> None:
        if self.file is not None:
            self.file.close()
            self.events.close()


def cut_back(path: Path, step: int) -> None:
    """Drops the lines after `step`, and a last line that was half written."""
    if not path.exists():
        return
    kept = [line for line in path.read_bytes().splitlines(keepends=True) if step_of(line) <= step]
    write_whole(path, b"".join(kept))


def step_of(line: bytes) -> float:
    """The step of a line; infinite if the line is not whole."""
    try:
        return float(json.loads(line)["step"]) if line.endswith(b"\n") else float("inf")
    except (ValueError, KeyError, TypeError):
        return float("inf")


def read_metrics(workdir: Path) -> list[dict[str, float]]:
    """All reports of a workdir, oldest first."""
    path = workdir / METRICS_FILE
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if step_of(line) < float("inf")]
