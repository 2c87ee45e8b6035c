"""Two processes really train, found through what JobSet and an indexed Job give, by the image's own
entry point: preempted, started again, they continue. `gcloud_test.py` does that on Cloud TPU.

What stands in is the cluster: hosts are folders, and the devices are the CPU's.
"""

import os
import shutil
import socket
import subprocess
import time

import pytest
import warm_python
from helpers import ROOT, metrics_of, numbered_lines
from manifests import GPU, TPU, expand, manifests, pods_of
from patience import patience
from process_runs import small_training
from stand_ins import add_python, slow_training

pytestmark = pytest.mark.slow
STEPS = 40


@pytest.fixture
def words(tmp_path):
    """Of a small training; the text's name has everything that a shell could take for its own."""
    text = tmp_path / "the $(text) 'is' \"here\".txt"
    text.write_text(numbered_lines(3000))
    return [
        "configs/shakespeare.py",
        f"--workdir={tmp_path / 'run'}",
        f"--config.data.path={text}",
        *small_training(STEPS),
    ]


def environment(stand_ins, **more):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    given = {"JAX_PLATFORMS": "cpu", "JAX_COORDINATOR_PORT": port, "OMP_NUM_THREADS": "1"}
    return stand_ins.environment(**given, TRAIN_CONTROL=str(stand_ins.folder), **more)


def set_seconds(stand_ins, seconds):
    """How much longer each step takes: a training must not end before it is preempted."""
    (stand_ins.folder / "seconds").write_text(str(seconds))


def steps(folder):
    return [line["step"] for line in metrics_of(folder / "run") if "train/loss" in line]


def wait_for_steps(folder, process):
    while len(steps(folder)) < 3:
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)


def assert_continued(folder):
    """Every step once, saved in between, and the log says of which processes."""
    assert steps(folder) == list(range(1, STEPS + 1))
    assert (folder / "run" / "checkpoints" / str(STEPS)).is_dir()


def start(command, **options):
    command = list(map(str, command))
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options
    )


ON_GKE = {
    "slice": [{"TPU_WORKER_HOSTNAMES": "localhost,localhost", "TPU_WORKER_ID": n} for n in "01"],
    "slices": [
        {
            "TPU_WORKER_HOSTNAMES": "localhost",
            "TPU_WORKER_ID": "0",
            "MEGASCALE_NUM_SLICES": "2",
            "MEGASCALE_SLICE_ID": n,
            "MEGASCALE_COORDINATOR_ADDRESS": "localhost:8080",
        }
        for n in "01"
    ],
    "job": [
        {
            "JAX_COORDINATOR_ADDRESS": "localhost",
            "JAX_NUM_PROCESSES": "2",
            "JOB_COMPLETION_INDEX": n,
        }
        for n in "01"
    ],
}


@pytest.fixture
def kind(sample):
    """One of the kinds: another every day."""
    return sample(ON_GKE)[0]


def test_gke(stand_ins, words, tmp_path, kind):
    """The container's arguments, the images' entry point, and GKE's variables."""
    place = GPU[1:3] if kind == "job" else TPU[1:3]
    volume = ("--pvc=claim", f"--mount={tmp_path}", "--unchecked")
    (jobset,) = manifests(stand_ins, *words, *place, *volume, "--image=image")
    container = pods_of(jobset)[2]
    image = tmp_path / "image"
    image.mkdir()
    for file in ("docker/verb.sh", "launch/forward.sh", "launch/xla_flags.py"):
        shutil.copy(ROOT / file, image)
    add_python(tmp_path / "venv", slow_training(warm_python.executable()))
    given = environment(stand_ins, PATH=f"{tmp_path}/venv/bin:{os.environ['PATH']}")
    command = [image / "verb.sh", *map(expand, container["args"])]
    for preempted in (True, False):
        set_seconds(stand_ins, 1 if preempted else 0)
        pods = [start(command, env={**given, **own}, cwd=tmp_path) for own in ON_GKE[kind]]
        if preempted:
            wait_for_steps(tmp_path, pods[0])
            pods[1].terminate()
        logs = [pod.communicate(timeout=patience(240))[0] for pod in pods]
        assert [pod.returncode for pod in pods] == [42 if preempted else 0] * 2, logs
        assert "2 x cpu, 2 process(es)" in logs[0]
    assert_continued(tmp_path)
