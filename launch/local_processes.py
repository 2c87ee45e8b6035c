"""Runs a command as several processes of this machine, which form one run.

    python launch/local_processes.py --processes=2 --devices_per_process=4 -- COMMAND ...

`launch/local.sh --processes=2 ...` calls this. If a process dies, the others are ended. The exit
status is that of the process that failed, else of process 0.
"""

import argparse
import os
import signal
import socket
import subprocess
import sys
import time

SAVED = (0, 42, 130)  # done; preempted and saved; stopped by Ctrl-C and saved
GRACE_SECONDS = 5  # for the others to end by themselves when one died
LEAVE_SECONDS = 60  # likewise when one ended well


def main() -> int:
    """Starts them, waits for them; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=2, help="how many")
    parser.add_argument("--devices_per_process", type=int, default=1, help="virtual CPU devices")
    parser.add_argument("command", nargs="+", help="after --, what each of them runs")
    arguments = parser.parse_args()
    for name in ("processes", "devices_per_process"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name}={getattr(arguments, name)} must be at least 1")
    count = arguments.processes
    processes = start(arguments.command, count, arguments.devices_per_process)
    # Ctrl-C reaches the processes from the terminal; SIGTERM is handed on.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: [p.send_signal(signal.SIGTERM) for p in processes])
    failed = wait(processes)
    return processes[0].returncode if failed is None else explain(failed, processes)


def start(command: list[str], count: int, devices: int) -> list[subprocess.Popen]:
    """The processes, each with its place in its environment."""
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
    places = [{**common, "JAX_PROCESS_ID": str(n)} for n in range(count)]
    return [subprocess.Popen(command, env=place) for place in places]


def wait(processes: list[subprocess.Popen]) -> int | None:
    """Waits for all, and ends the others if one dies: returns the number of that one, or None."""
    while all(process.poll() is None for process in processes):
        time.sleep(0.1)
    failed = first_failed(processes)
    end_after(processes, GRACE_SECONDS if failed is not None else LEAVE_SECONDS)
    return first_failed(processes) if failed is None else failed


def first_failed(processes: list[subprocess.Popen]) -> int | None:
    """The number of a process that ended, and neither well nor saved."""
    ended = (n for n, process in enumerate(processes) if process.poll() is not None)
    return next((n for n in ended if processes[n].returncode not in SAVED), None)


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
    )
    return code if code > 0 else 1


if __name__ == "__main__":
    sys.exit(main())
