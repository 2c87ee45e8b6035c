"""Two training processes that stop for a moment in each phase, for a test to send them a signal.

They are forked from a server that has imported everything, and their model is the smallest, so that
a run costs seconds. All else is the real thing: `train` as a verb, JAX's distributed service, Gloo,
Orbax.
"""

import multiprocessing
import os
import re
import signal
import sys
import time
from pathlib import Path

from compilation import flags_of_processes
from patience import patience
from slurm_cluster import free_ports

from t5x_diffeq.cluster.peers import EXIT_INFRASTRUCTURE

PHASES = ("start-up", "compile", "loop", "evaluate", "save")
STEPS = 60
EVERY = 4  # steps from checkpoint to checkpoint
PAUSE = 1.5  # seconds in each phase, for the signal to come in

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["fault_processes", "t5x_diffeq.train"])


def arguments(text, workdir):
    """Of the smallest run that there is."""
    return [
        "--config=configs/shakespeare.py:baseline",
        f"--workdir={workdir}",
        f"--config.data.path={text}",
        *("--config.model.embed_dim=16", "--config.model.num_heads=2"),
        *("--config.model.mlp_dim=16", "--config.model.num_steps=1", "--config.model.remat=none"),
        *("--config.data.sequence_length=16", "--config.train.batch_size=4"),
        *("--config.train.eval_batches=1", "--config.train.eval_batch_size=4"),
        *(f"--config.train.total_steps={STEPS}", f"--config.train.checkpoint_every={EVERY}"),
        *("--config.train.log_every=1", "--config.train.eval_every=20"),
        f"--config.train.hang_timeout={patience(120)}",  # a run that hangs by itself says where
    ]


class FaultyRun:
    """A run of two processes on `workdir`, one of which stops in `phase` and says so.

    Args:
      arguments: of `train`.
      folder: for the logs.
      victim: the process that is to stop; None: neither.
      phase: where.
      more: arguments that only the victim has.
      silence: seconds that a process may be silent; None: what suits the machine.
      pause: seconds for which it stops.
    """

    def __init__(
        self, arguments, folder, victim=None, phase=None, more=(), silence=None, pause=PAUSE
    ):
        self.folder = folder
        [port] = free_ports(1)
        self.mark = folder / "mark"
        # A collective of the devices gives up after 30 s, which a silent peer has to come before.
        self.silence = round(silence or min(patience(10), 15))
        self.processes = []
        for index in (0, 1):
            environment = {
                "JAX_COORDINATOR_ADDRESS": f"localhost:{port}",
                "JAX_NUM_PROCESSES": "2",
                "JAX_PROCESS_ID": str(index),
                "T5X_DIFFEQ_SILENCE_SECONDS": str(self.silence),
                "XLA_FLAGS": flags_of_processes(),
            }
            own, stop = ([*arguments, *more], phase) if index == victim else (arguments, None)
            process = FORKS.Process(
                target=train,
                args=(own, environment, self.log(index), stop, self.mark, pause),
            )
            process.start()
            self.processes.append(process)

    def log(self, index):
        return self.folder / f"{index}.log"

    def messages(self, index):
        """What it said, but for its steps."""
        lines = self.log(index).read_text().splitlines()
        return "\n".join(line for line in lines if not line.startswith("step "))

    def wait_for_mark(self):
        deadline = time.monotonic() + 900
        while not self.mark.exists():
            assert time.monotonic() < deadline and self.processes[0].is_alive(), self.messages(0)
            time.sleep(0.05)

    def end(self, index):
        """The exit status of a process, once it has ended."""
        self.processes[index].join(900)
        status = self.processes[index].exitcode
        if status is None:
            self.kill()
        assert status is not None, f"process {index} hangs: {self.messages(index)}"
        if status == EXIT_INFRASTRUCTURE:
            self.show_stacks()
        return status

    def show_stacks(self):
        """Prints where the processes were, if the run said that it hangs."""
        told = re.search(r"the stacks of all threads are in (\S+);", self.messages(0))
        for file in sorted(Path(told[1]).glob("*.txt")) if told else ():
            print(f"{file}:\n{file.read_text()}")

    def kill(self):
        for process in self.processes:
            process.kill()


def train(arguments, environment, log, phase, mark, pause):
    """A process of the run, in a child of the server."""
    from t5x_diffeq.checkpoints import checkpoint, checksums
    from t5x_diffeq.cli import command_line
    from t5x_diffeq.cli import train as verb
    from t5x_diffeq.training import loop
    from t5x_diffeq.training.hooks import basic_hooks

    os.environ.update(environment)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout, sys.stderr = (os.fdopen(n, "w", buffering=1, closefd=False) for n in (1, 2))
    sys.argv = ["train", *arguments]

    def stop_in(place, name, wanted, number=1):
        """Stops in the `number`th call of a function of a module or class, in that phase."""
        function, calls = getattr(place, name), []

        def stop_then_call(*args, **kwargs):
            calls.append(name)
            if phase == wanted and len(calls) == number:
                Path(mark).touch()
                time.sleep(pause)
            return function(*args, **kwargs)

        setattr(place, name, stop_then_call)

    stop_in(loop, "make_setup", "start-up")
    stop_in(checkpoint.Checkpoints, "restore", "restore")
    stop_in(loop, "compile_train_steps", "compile")
    stop_in(loop, "depths_of", "loop", number=3)
    stop_in(basic_hooks, "evaluate_loss", "evaluate")
    stop_in(checksums, "save_local_sums", "save", number=2)
    command_line.run(verb.main, verb.__doc__, verb.FLAGS, several=True)


def last_line(told):
    return told.strip().splitlines()[-1]


def lose(run, victim, number, phase):
    """One fault: sends the signal to the victim, and looks how the two end."""
    other = 1 - victim
    run.wait_for_mark()
    signal_to(run, victim, number)
    if number == signal.SIGTERM and phase != "start-up":  # both stop at the same place
        assert [run.end(index) for index in (0, 1)] == [42, 42], run.messages(0)
        return
    assert run.end(other) == 175, run.messages(other)
    told = run.messages(other)
    silent = f"has not answered for {run.silence} s"
    how = silent if number == signal.SIGSTOP else "was lost: it was killed"
    assert last_line(told).startswith(f"error: process {victim} of 2 {how}"), told
    assert told.count("error:") == 1 and "Traceback" not in told and "@ " not in told, told
    if number == signal.SIGSTOP:
        signal_to(run, victim, signal.SIGCONT)
        assert run.end(victim) == 175, run.messages(victim)
    else:
        assert run.end(victim) == -number


def signal_to(run, index, number):
    os.kill(run.processes[index].pid, number)
