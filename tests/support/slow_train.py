"""`train`, as slow as a test needs it, and with faults.

The folder $TRAIN_CONTROL holds `seconds`, the time that every step takes longer, read at each step;
and may hold `fault`, `STEP PROCESS STATUS`: that process then ends with that status, once. The step
is the last one that the run has reported, since one process can dispatch many ahead of another.
"""

import os
import runpy
import sys
import time
from pathlib import Path

from compilation import QUICK

sys.path.insert(0, os.getcwd())  # as `python -m` has it
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {QUICK}"

import jax

from t5x_diffeq.cluster.signals import StopSignals
from t5x_diffeq.training.tracking.jsonl import read_metrics

CONTROL = Path(os.environ["TRAIN_CONTROL"])
should_stop = StopSignals.should_stop


def reported_step() -> int:
    reports = read_metrics(CONTROL / "run")
    return max((report["step"] for report in reports if "train/loss" in report), default=0)


def stop_slowly(stop: StopSignals) -> bool:
    """Like `should_stop`, later."""
    time.sleep(float((CONTROL / "seconds").read_text()))
    fault = CONTROL / "fault"
    if fault.exists():
        at, process, status = map(int, fault.read_text().split())
        if reported_step() >= at and jax.process_index() == process:
            fault.unlink()
            os._exit(status)
    return should_stop(stop)


StopSignals.should_stop = stop_slowly
runpy.run_module("t5x_diffeq.train", run_name="__main__", alter_sys=True)
