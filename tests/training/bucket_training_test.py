"""Whole runs in a bucket: killed amid a checkpoint, preempted, continued, evaluated.

The clients and the server are others' (see bucket_server.py).
"""

import json
import os
import re
import signal
import subprocess
import sys

import pytest
import warm_python
from bucket_server import serve
from compilation import flags_of_processes
from helpers import ROOT, numbered_lines, without_machine
from patience import patience
from process_runs import SMALL_MODEL

pytestmark = pytest.mark.slow
SHARDS = "gs://bucket/my shards"
RUN = "gs://bucket/runs/a"


class Bucket:
    """The server's store, and processes that work on it."""

    def __init__(self, store, environment, folder):
        self.store, self.folder = store, folder
        self.environment = {
            **os.environ,
            **environment,
            "XLA_FLAGS": flags_of_processes(),
            "T5X_DIFFEQ_CACHE": str(folder / "cache"),
            "T5X_DIFFEQ_LEASE_SECONDS": f"{patience(2):.0f}",
        }

    def start(self, verb, *arguments, launcher=()):
        verb = (warm_python.executable(), "-m", f"t5x_diffeq.{verb}")
        command = [*launcher, *verb, *map(str, arguments)]
        pipe = subprocess.PIPE
        return subprocess.Popen(
            command, cwd=ROOT, env=self.environment, stdout=pipe, stderr=pipe, text=True
        )

    def run(self, verb, *arguments, launcher=()):
        """Standard output and error of a verb that ends well."""
        process = self.start(verb, *arguments, launcher=launcher)
        out, log = process.communicate(timeout=patience(300))
        assert process.returncode == 0, log
        return out, log

    def lines(self, name="runs/a"):
        return reports(self.store.read(f"{name}/metrics.jsonl").decode())


def reports(text):
    lines = map(json.loads, text.splitlines())
    return [without_machine(line) for line in lines]


@pytest.fixture(scope="module")
def bucket(tmp_path_factory):
    """With shards that `prepare_data` made there, of text that lies there."""
    text = numbered_lines(3000)
    with serve() as (store, environment):
        bucket = Bucket(store, environment, tmp_path_factory.mktemp("run"))
        store.put("texts/a.txt", text.encode())
        bucket.run(
            "prepare_data",
            *("--config=configs/shakespeare.py", f"--output={SHARDS}", "--shards=2"),
            *("--config.data.path=gs://bucket/texts", "--workers=2"),
        )
        yield bucket


def training(workdir, *more):
    return (
        *("--config=configs/shakespeare.py", f"--workdir={workdir}"),
        *("--config.data.source=tokens", f"--config.data.path={SHARDS}"),
        *SMALL_MODEL,
        *("--config.train.log_every=5", "--config.train.eval_every=20"),
        *("--config.train.total_steps=60", "--config.train.checkpoint_every=20", *more),
    )


def kill_during(bucket, process, checkpoint):
    """SIGKILL, when an object is sent and the first of the checkpoint is there."""
    folder = f"runs/a/checkpoints/{checkpoint}/"

    def refuse(method, path):
        if process.poll() is None and "/upload/" in path and bucket.store.names(folder):
            process.kill()
            process.wait()
        return None if process.poll() is None else 503

    bucket.store.refuse = refuse
    process.communicate()
    bucket.store.refuse = lambda method, path: None
    assert process.returncode == -signal.SIGKILL
    there = bucket.store.names(folder)
    assert there and f"{folder}commit_success.txt" not in there


def test_killed_preempted_damaged_and_continued_equals_undisturbed(bucket, tmp_path):
    bucket.run("train", *training(tmp_path))
    kill_during(bucket, bucket.start("train", *training(RUN)), 40)
    process = bucket.start("train", *training(RUN))
    told = []
    for line in process.stderr:
        told.append(line)
        if line.startswith("step 45/"):
            process.send_signal(signal.SIGTERM)
    assert process.wait() == 42, "".join(told)
    assert any("is held by process" in line for line in told)  # the one that was killed
    assert any("continuing at step 20 in gs://bucket/runs/a" in line for line in told)
    saved = damage_newest(bucket, 40)
    _, log = bucket.run("train", *training(RUN))
    assert "is held by process" not in log
    assert f"moved to gs://bucket/runs/a/unreadable_checkpoints/{saved}" in log
    assert bucket.store.names(f"runs/a/unreadable_checkpoints/{saved}/state/")
    assert "continuing at step 40 in gs://bucket/runs/a" in log
    assert bucket.lines() == reports((tmp_path / "metrics.jsonl").read_text())
    out, _ = bucket.run("evaluate", f"--workdir={RUN}")
    assert json.loads(out)["eval/loss"] == pytest.approx(bucket.lines()[-1]["eval/loss"], rel=1e-6)
    names = bucket.store.names("runs/a/")
    assert not any("compilation" in name for name in names)  # native code, which others could write
    assert any("events" in name for name in names)
    assert not any("partial" in name or ".lock" in name for name in names)
    assert not (ROOT / "gs:").exists()


def damage_newest(bucket, older):
    """Damages the checkpoint that came after an older one; returns its step."""
    names = bucket.store.names("runs/a/checkpoints/")
    step = max(int(name.split("/")[3]) for name in names if name.split("/")[3].isdecimal())
    assert step > older
    for name in bucket.store.names(f"runs/a/checkpoints/{step}/state/"):
        bucket.store.put(name, b"?")
    return step


def wait_for_line(process, beginning):
    """Returns when it has told a line that begins so."""
    assert any(line.startswith(beginning) for line in process.stderr)


@pytest.mark.in_turns("whole programs")
def test_two_processes(bucket):
    """One run, as on a pod: each writes its part of checkpoints. While it lives, no other may."""
    launcher = (
        *(sys.executable, str(ROOT / "launch" / "local_processes.py")),
        *("--processes=2", "--devices_per_process=1", "--"),
    )
    workdir, steps = "gs://bucket/runs/two", "--config.train.total_steps=5000"
    process = bucket.start("train", *training(workdir, steps), launcher=launcher)
    wait_for_line(process, "training in")
    other = bucket.start("train", *training(workdir, steps))
    _, log = other.communicate()
    assert other.returncode == 2
    assert f"error: another process is writing --workdir={workdir}" in log
    wait_for_line(process, "step ")
    process.send_signal(signal.SIGTERM)
    _, log = process.communicate()
    assert process.returncode == 42
    saved = re.search(r"stopped by SIGTERM after step (\d+), saved", log)[1]
    names = bucket.store.names(f"runs/two/checkpoints/{saved}/state/")
    for number in (0, 1):
        of_process = f"ocdbt.process_{number}/manifest.ocdbt"
        assert f"runs/two/checkpoints/{saved}/state/{of_process}" in names
    assert bucket.run("generate", f"--workdir={workdir}", "--max_tokens=4")[0].strip()
