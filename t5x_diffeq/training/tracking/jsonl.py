"""JSON files in the workdir; in those named `.jsonl`, each line is one report.

metrics.jsonl          numbers
curves.jsonl           arrays, such as norms over depth
samples.jsonl          texts
hyperparameters.json   what describes the run; written anew at each start
"""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from t5x_diffeq.system.console import log
from t5x_diffeq.system.errors import InputError
from t5x_diffeq.system.files import (
    AnyPath,
    describe_error,
    parse_json,
    read_json_object,
    write_whole,
)
from t5x_diffeq.system.growing_file import GrowingFile
from t5x_diffeq.training.tracking.interface import Array, Scalar, Tracker

_METRICS, _CURVES, _SAMPLES = "metrics.jsonl", "curves.jsonl", "samples.jsonl"
_HYPERPARAMETERS = "hyperparameters.json"


class JsonlWriter(Tracker):
    """Appends reports to the files of a workdir.

    Every line is stored before the method returns; in a bucket, before `flush` does. A checkpoint
    of step s is saved after that, so a run that is killed and resumed leaves the same lines as an
    uninterrupted one.

    Lines after `step`, the one to resume from, are removed; if it is 0, all are.
    """

    def __init__(self, workdir: AnyPath, step: int):
        self.workdir = workdir
        self.files: dict[str, GrowingFile] = {}
        self.reports = 0  # lines of metrics.jsonl
        self._open(step)

    def rewind(self, step: int) -> None:
        """Removes the lines after `step`, which the run takes again."""
        self.flush()
        self._open(step)

    def _open(self, step: int) -> None:
        workdir, self.reports = self.workdir, 0
        for name in (_METRICS, _CURVES, _SAMPLES):
            if name == _METRICS or (workdir / name).exists():
                kept = _lines_up_to(workdir / name, step if step > 0 else -1)
                self.files[name] = GrowingFile(workdir / name, kept)
                self.reports += kept.count(b"\n") if name == _METRICS else 0

    def _append(self, name: str, line: dict[str, Any]) -> None:
        if name not in self.files:
            self.files[name] = GrowingFile(self.workdir / name)
        self.files[name].write(f"{json.dumps(line)}\n".encode())

    def write_scalars(self, step: int, scalars: Mapping[str, Scalar]) -> None:
        """Appends to `metrics.jsonl`."""
        numbers = {k: x if isinstance(x, int | float) else float(x) for k, x in scalars.items()}
        self._append(_METRICS, {"step": step, **numbers})
        self.reports += 1

    def write_summaries(
        self, step: int, values: Mapping[str, Array], metadata: Mapping[str, Any] | None = None
    ) -> None:
        """Appends to `curves.jsonl`: the arrays as nested lists."""
        arrays = {name: np.asarray(value).tolist() for name, value in values.items()}
        self._append(_CURVES, {"step": step, **arrays})

    def write_texts(self, step: int, texts: Mapping[str, str]) -> None:
        """Appends to `samples.jsonl`."""
        self._append(_SAMPLES, {"step": step, **texts})

    def write_hparams(self, hparams: Mapping[str, Any]) -> None:
        """Replaces `hyperparameters.json`."""
        content = json.dumps(dict(hparams), indent=2, default=str)
        write_whole(self.workdir / _HYPERPARAMETERS, content.encode())

    def flush(self) -> None:
        """Returns when every line is stored."""
        for file in self.files.values():
            file.flush()

    def close(self) -> None:
        """Flushes for the last time."""
        for file in self.files.values():
            file.close()


def _lines_up_to(path: AnyPath, step: int) -> bytes:
    return b"".join(line for line in _lines_of(path) if _step_of(line) <= step)


def _lines_of(path: AnyPath) -> list[bytes]:
    try:
        return path.read_bytes().splitlines(keepends=True) if path.exists() else []
    except OSError as error:
        raise InputError(f"{path} can't be read: {describe_error(error)}; move it away") from error


def warn_if_lost(workdir: AnyPath, step: int, reports: int | None) -> None:
    """Warns if the metrics have fewer lines than checkpoint `step` says, if it says it."""
    there = _lines_up_to(workdir / _METRICS, step).count(b"\n")
    if reports is not None and there < reports:
        log(
            f"warning: {workdir / _METRICS} has {there} of the {reports} lines that it had at "
            f"checkpoint {step}: it was cut or replaced; training continues, those lines are lost"
        )


def kinds_reported_at(workdir: AnyPath, step: int) -> list[str]:
    """What was reported at a step: `train`, `eval`, `tasks`, `sample`, as in `eval/loss`."""
    paths = (workdir / _METRICS, workdir / _SAMPLES)
    lines = [line for path in paths for line in _lines_of(path) if _step_of(line) == step]
    return sorted({name.partition("/")[0] for line in lines for name in parse_json(line)})


def copy_metrics(source: AnyPath, workdir: AnyPath, step: int) -> None:
    """Copies the reports up to `step` from one workdir to another."""
    write_whole(workdir / _METRICS, _lines_up_to(source / _METRICS, step))


def _step_of(line: bytes) -> float:
    try:
        return float(parse_json(line)["step"]) if line.endswith(b"\n") else float("inf")
    except (ValueError, KeyError, TypeError):
        return float("inf")


def read_metrics(workdir: AnyPath) -> list[dict[str, float]]:
    """All reports in a workdir, oldest first."""
    lines = _lines_of(workdir / _METRICS)
    return [parse_json(line) for line in lines if _step_of(line) < float("inf")]


def read_hyperparameters(workdir: AnyPath) -> dict[str, Any]:
    """What describes the run in a workdir; empty if that can't be read."""
    try:
        return read_json_object(workdir / _HYPERPARAMETERS)
    except (OSError, ValueError):
        return {}
