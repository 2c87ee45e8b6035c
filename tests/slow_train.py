"""`train`, as slow as a test needs it, and with faults.

The folder $TRAIN_CONTROL holds `seconds`, the time that every step takes longer, read at each step;
and may hold `fault`, `STEP PROCESS STATUS`: that process then ends with that status, once.
"""

import os
import runpy
import time
from pathlib import Path

import jax

from t5x_diffeq import command_line
from t5x_diffeq.training.stop import StopSignals

CONTROL = Path(os.environ["TRAIN_CONTROL"])
after = StopSignals.after


def slowly(stop: StopSignals, step: int) -> bool:
    """Like `after`, later."""
    time.sleep(float((CONTROL / "seconds").read_text()))
    fault = CONTROL / "fault"
    if fault.exists():
        at, process, status = map(int, fault.read_text().split())
        if step >= at and jax.process_index() == process:
            fault.unlink()
            os._exit(status)
    return after(stop, step)


def fail(status: int, error: object) -> int:
    """Like `command_line.fail`, but a lost process is told from a failure: 175."""
    if str(error).startswith("JaxRuntimeError"):
        print(f"error: {error}", flush=True)
        os._exit(175)
    return fail_of_program(status, error)


fail_of_program, command_line.fail = command_line.fail, fail
StopSignals.after = slowly
(CONTROL / f"cpus-{os.environ.get('SLURM_PROCID', 0)}").write_text(
    str(len(os.sched_getaffinity(0)))
)
runpy.run_module("t5x_diffeq.train", run_name="__main__", alter_sys=True)
