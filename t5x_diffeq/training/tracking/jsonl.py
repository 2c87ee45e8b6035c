"""Writes and reads JSON files in the workdir; each line of a `.jsonl` file is one report.

metrics.jsonl          numbers
curves.jsonl           arrays, such as norms over depth
samples.jsonl          texts
hyperparameters.json   what describes the run; written anew at each start
"""

import json
from collections.abc import Iterator, Mapping
from itertools import takewhile
from sys import intern
from typing import Any

import numpy as np

from t5x_diffeq.system.console import log
from t5x_diffeq.system.files import AnyPath, parse_json, read_json_object, write_whole
from t5x_diffeq.system.growing_file import GrowingFile, copy_beginning
from t5x_diffeq.system.json_lines import NUMBER, check_types, last_lines, read_json_lines
from t5x_diffeq.training.tracking.interface import Array, Scalar, Tracker

_METRICS, _CURVES, _SAMPLES = "metrics.jsonl", "curves.jsonl", "samples.jsonl"
_HYPERPARAMETERS = "hyperparameters.json"


class JsonlWriter(Tracker):
    """Appends reports to the files of a workdir.

    Every line is stored before the method that writes it returns; in a bucket, before `flush`
    returns. A checkpoint of step s is saved after the lines of step s, so a run that is killed and
    resumed leaves the same lines as an uninterrupted run.

    The run resumes from `step`: the lines of later steps are removed, or if `step` is 0, all lines.
    If fewer reports than `expected` remain, a warning says so.

    Attributes:
      reports: the number of lines of `metrics.jsonl`.
    """

    def __init__(self, workdir: AnyPath, step: int, expected: int | None = None):
        self.workdir = workdir
        self.files: dict[str, GrowingFile] = {}
        self._open(step)
        if self.reports < (expected or 0):
            log(
                f"warning: {workdir / _METRICS} has {self.reports} of the {expected} lines that it "
                f"had at checkpoint {step}: it was cut or replaced; training continues, those "
                "lines are lost"
            )

    def rewind(self, step: int) -> None:
        """Removes the lines after `step`, which the run takes again."""
        self.flush()
        self._open(step)

    def _open(self, step: int) -> None:
        for name in (_METRICS, _CURVES, _SAMPLES):
            path = self.workdir / name
            if name == _METRICS or path.exists():
                self.files[name] = GrowingFile(path, _end_of(path, step) if step > 0 else 0)
        self.reports = self.files[_METRICS].lines

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


def _step_of(line: bytes) -> float:
    """The step of a line; infinity if it is incomplete, or no report."""
    try:
        return float(parse_json(line)["step"]) if line.endswith(b"\n") else float("inf")
    except (ValueError, KeyError, TypeError):
        return float("inf")


def _end_of(path: AnyPath, step: int) -> int:
    """The position behind the last line of this step or an earlier step; 0 if there is none."""
    return next((end for end, line in last_lines(path) if _step_of(line) <= step), 0)


def kinds_reported_at(workdir: AnyPath, step: int) -> list[str]:
    """What was reported at a step: `train`, `eval`, `sample`, as in `eval/loss`."""
    kinds = set()
    for path in (workdir / _METRICS, workdir / _SAMPLES):
        lines = (line for _, line in last_lines(path))
        for line in takewhile(lambda line: _step_of(line) >= step, lines):
            if _step_of(line) == step:
                kinds |= {name.partition("/")[0] for name in parse_json(line)}
    return sorted(kinds)


def copy_metrics(source: AnyPath, workdir: AnyPath, step: int) -> None:
    """Copies the reports up to `step` from one workdir to another."""
    path = source / _METRICS
    copy_beginning(path, workdir / _METRICS, _end_of(path, step))


def read_metrics(workdir: AnyPath, name: str = "") -> Iterator[dict[str, float]]:
    """The reports in a workdir, oldest first; with a name, only reports that have this number.

    Reports are read one by one. Lines that are no reports are left out, with a warning.

    Raises:
      InputError: if the file can't be read.
    """
    for _, report in read_json_lines(workdir / _METRICS, _check_report, key=name):
        # Reports that are kept share the strings of their names.
        yield {intern(name): number for name, number in report.items()}


def _check_report(report: dict[str, Any]) -> None:
    check_types(report, {"step": NUMBER, **dict.fromkeys(report, NUMBER)})


def read_hyperparameters(workdir: AnyPath) -> dict[str, Any]:
    """What describes the run in a workdir; empty if that can't be read."""
    try:
        return read_json_object(workdir / _HYPERPARAMETERS)
    except (OSError, ValueError):
        return {}
