"""`train`, as slow as a test needs it, and with faults.

The folder $TRAIN_CONTROL holds `seconds`, the time that every step takes longer, read at each step;
and may hold `fault`, `STEP PROCESS STATUS`: that process then ends with that status, once.
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

from t5x_diffeq.runtime.signals import StopSignals
from t5x_diffeq.training import depths

CONTROL = Path(os.environ["TRAIN_CONTROL"])
should_stop, depths_of = StopSignals.should_stop, depths.depths_of
current = {}  # the step that was dispatched last


def note_step(config: object, step: int) -> object:
    """Like `depths_of`, which the loop asks at every step."""
    current["step"] = step
    return depths_of(config, step)


def stop_slowly(stop: StopSignals) -> bool:
    """Like `should_stop`, later."""
    time.sleep(float((CONTROL / "seconds").read_text()))
    fault = CONTROL / "fault"
    if fault.exists():
        at, process, status = map(int, fault.read_text().split())
        if current["step"] >= at and jax.process_index() == process:
            fault.unlink()
            os._exit(status)
    return should_stop(stop)


depths.depths_of = note_step
StopSignals.should_stop = stop_slowly
(CONTROL / f"cpus-{os.environ.get('SLURM_PROCID', 0)}").write_text(
    str(len(os.sched_getaffinity(0)))
)
runpy.run_module("t5x_diffeq.train", run_name="__main__", alter_sys=True)
