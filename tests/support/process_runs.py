"""Real runs of several processes on this machine, for tests."""

import os
import signal
import subprocess
import sys

import numpy as np
import warm_python
from compilation import flags_of_processes
from helpers import ROOT, SUPPORT, numbered_lines
from patience import patience

from t5x_diffeq.training.tracking.jsonl import read_metrics

# Tests that run in a shell's background ignore Ctrl-C, and would hand that on.
HEAR_CTRL_C = ["env", "--default-signal=INT"]
REMATERIALIZED = "Involuntary full rematerialization"  # XLA's word for a gathered activation


SMALL_MODEL = (  # what XLA compiles soonest, and computes in milliseconds
    *("--config.model.embed_dim=16", "--config.model.num_heads=2", "--config.model.mlp_dim=32"),
    *("--config.model.num_steps=2", "--config.model.time_embed_dim=4"),
    *("--config.model.num_frequencies=4", "--config.model.remat=none"),
    "--config.data.sequence_length=32",
)


def small_training(steps: int) -> list[str]:
    """Keys of a training on any text, each step of which is reported."""
    return [
        *SMALL_MODEL,
        *("--config.train.batch_size=8", "--config.train.eval_batch_size=8"),
        *("--config.train.eval_batches=2", f"--config.train.total_steps={steps}"),
        *("--config.train.log_every=1", "--config.train.eval_every=1000"),
    ]


def write_text(folder):
    """A text of 3000 lines."""
    path = folder / "text.txt"
    path.write_text(numbered_lines(3000))
    return path


def as_processes(processes, devices, program):
    """The command that runs `program` as so many processes with so many CPU devices each."""
    launcher = [sys.executable, ROOT / "launch" / "local_processes.py"]
    counts = [f"--processes={processes}", f"--devices_per_process={devices}"]
    return [*launcher, *counts, "--", *program]


def command(text, workdir, processes, devices, *more, order=None):
    """The command of a tiny run of 20 steps; its devices may be in another `order`."""
    ordered = [SUPPORT / "device_order.py", order] if order else ["-m"]
    train = [
        *(warm_python.executable(), *ordered, "t5x_diffeq.train"),
        *("--config=configs/shakespeare.py", f"--workdir={workdir}"),
        *(f"--config.data.path={text}", *SMALL_MODEL),
        *("--config.train.batch_size=16", "--config.train.eval_batch_size=16"),
        *("--config.train.eval_batches=4", "--config.train.total_steps=20"),
        *("--config.train.log_every=1", "--config.train.checkpoint_every=10", *more),
    ]
    return as_processes(processes, devices, train)


def start(arguments):
    """The process of a command, its standard output and error piped."""
    environment = {**os.environ, "XLA_FLAGS": flags_of_processes(), "JAX_PLATFORMS": "cpu"}
    return subprocess.Popen(
        arguments, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True, stdout=-1
    )


def run(*arguments, **options):
    """The log of a run that ends well; arguments as those of `command`."""
    process = start(command(*arguments, **options))
    out, log = process.communicate(timeout=patience(900))
    assert process.returncode == 0, log
    assert REMATERIALIZED not in log
    assert out == ""  # results only: nothing of Gloo's
    return log


def stop_at(step, *arguments, **options):
    """Starts a run and stops it with SIGTERM when it has reported `step`."""
    process = start(command(*arguments, **options))
    for line in process.stderr:
        if line.startswith(f"step {step}/"):
            process.send_signal(signal.SIGTERM)
            break
    log = process.stderr.read()
    assert process.wait() == 42, log
    assert "saved; the same command continues" in log


def read_reports(workdir, name="train/loss"):
    """The values of that name in `metrics.jsonl`, in order."""
    return np.array([report[name] for report in read_metrics(workdir) if name in report])
