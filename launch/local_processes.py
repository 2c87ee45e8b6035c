"""Runs a command as several processes of this machine, which form one run.

    python launch/local_processes.py --processes=2 --devices_per_process=4 -- COMMAND ...

`launch/local.sh --processes=2 ...` calls this script. If a process dies, the others are ended. The
exit status is the status of the first process that failed by itself, 175 if a process was lost, or
else process 0's. After 175 all processes are started again, at most `--restarts` times.
"""

import argparse
import os
import signal
import socket
import subprocess
import sys
import time
from typing import NoReturn

SAVED = (0, 42, 130)  # done; preempted and saved; stopped by Ctrl-C and saved
LOST = 175  # a process was lost, or a link: start all again
GRACE_SECONDS = 15  # for the others to end by themselves when a process died
LEAVE_SECONDS = 60  # for the others to end by themselves when a process ended well


class Parser(argparse.ArgumentParser):
    """Prints what is wrong in one line, as all verbs and scripts do."""

    def error(self, message: str) -> NoReturn:
        """Ends with status 2."""
        print(f"error: {message}", file=sys.stderr)
        sys.exit(2)


def main() -> int:
    """Starts the processes and waits for them; returns the exit status."""
    parser = Parser(allow_abbrev=False, description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=2, help="how many")
    parser.add_argument("--devices_per_process", type=int, default=1, help="virtual CPU devices")
    parser.add_argument("--restarts", type=int, default=0, help="after a process was lost")
    parser.add_argument("command", nargs="+", help="after --, what each of them runs")
    arguments = parser.parse_args()
    for name, least in (("processes", 1), ("devices_per_process", 1), ("restarts", 0)):
        if getattr(arguments, name) < least:
            parser.error(f"--{name}={getattr(arguments, name)} must be at least {least}")
    for restarts_left in range(arguments.restarts, -1, -1):
        status = run(arguments.command, arguments.processes, arguments.devices_per_process)
        if status != LOST or not restarts_left:
            break
        print(f"starting again (at most {restarts_left} times)", file=sys.stderr, flush=True)
    return status


def run(command: list[str], count: int, devices: int) -> int:
    """Starts all processes once, and waits for them; returns the exit status."""
    stopping: list[int] = []
    processes = start(command, count, devices)

    def hand_on(number: int, frame: object) -> None:
        stopping.append(number)
        for process in processes:
            process.send_signal(signal.SIGTERM)

    # Ctrl-C reaches the processes from the terminal; SIGTERM is handed on.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, hand_on)
    failed = wait(processes)
    if failed is None:
        return processes[0].returncode
    status = explain(failed, processes)
    return 128 + stopping[0] if stopping and status == LOST else status


def start(command: list[str], count: int, devices: int) -> list[subprocess.Popen]:
    """Starts the processes, each with its rank in its environment."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    devices_flag = f"--xla_force_host_platform_device_count={devices}"
    common = {
        "JAX_PLATFORMS": "cpu",
        **os.environ,
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {devices_flag}".strip(),
        "JAX_COORDINATOR_ADDRESS": f"localhost:{port}",
        "JAX_NUM_PROCESSES": str(count),
    }
    environments = [{**common, "JAX_PROCESS_ID": str(n)} for n in range(count)]
    return [subprocess.Popen(command, env=environment) for environment in environments]


def wait(processes: list[subprocess.Popen]) -> int | None:
    """Waits for all, and ends the others if a process dies: returns its number, or None."""
    while all(process.poll() is None for process in processes):
        time.sleep(0.1)
    failed = find_failed(processes)
    end_after(processes, GRACE_SECONDS if failed is not None else LEAVE_SECONDS)
    return find_failed(processes) if failed is None else failed


def find_failed(processes: list[subprocess.Popen]) -> int | None:
    """The number of a process that ended neither well nor saved: of a lost one, if there is one."""
    failed = [
        n
        for n, process in enumerate(processes)
        if process.poll() is not None and process.returncode not in SAVED
    ]
    return min(failed, key=lambda n: processes[n].returncode, default=None)


def end_after(processes: list[subprocess.Popen], seconds: float) -> None:
    """Gives the processes so long to end by themselves, then kills them."""
    deadline = time.monotonic() + seconds
    for process in processes:
        try:
            process.wait(max(deadline - time.monotonic(), 0.0))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def explain(failed: int, processes: list[subprocess.Popen]) -> int:
    """Says which process failed; returns the exit status for it."""
    code = processes[failed].returncode
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
    print(
        f"error: process {failed} of {len(processes)} {how}; the others were ended",
        file=sys.stderr,
        flush=True,
    )
    return code if code > 0 else LOST


if __name__ == "__main__":
    sys.exit(main())
