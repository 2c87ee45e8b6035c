"""Two processes really train by a manifest of launch/gke.sh: its words and variables, the image's
entry point, and what GKE, JobSet and an indexed Job add. Preempted, started again, they continue.

What stands in is the cluster: hosts are folders, and the devices are the CPU's.
"""

import os
import shutil
import subprocess

import pytest
from helpers import ROOT
from launched_run import STEPS, LaunchedRun
from manifests import expand, manifests, pods_of
from patience import patience, wait_for
from slurm_cluster import free_ports

PODS = {  # of each kind of run: its options, and what each pod is told
    "slice": (
        ["--topology=2x2x2"],
        [{"TPU_WORKER_HOSTNAMES": "localhost,localhost", "TPU_WORKER_ID": n} for n in "01"],
    ),
    "slices": (
        ["--topology=2x2x1", "--slices=2"],
        [
            {
                "TPU_WORKER_HOSTNAMES": "localhost",
                "TPU_WORKER_ID": "0",
                "MEGASCALE_NUM_SLICES": "2",
                "MEGASCALE_SLICE_ID": n,
                "MEGASCALE_COORDINATOR_ADDRESS": "localhost:8080",
            }
            for n in "01"
        ],
    ),
    "job": (
        ["--gpu=kind", "--nodes=2"],
        [{"JAX_COORDINATOR_ADDRESS": "localhost", "JOB_COMPLETION_INDEX": n} for n in "01"],
    ),
}


@pytest.fixture
def kind(sample):
    """One of the kinds: another every day."""
    return sample(PODS)[0]


@pytest.mark.slow
@pytest.mark.in_turns("whole programs")
def test_gke(stand_ins, tmp_path, kind):
    run = LaunchedRun(tmp_path / "user")
    options, pods = PODS[kind]
    mine, *words = run.words
    words += [f"--workdir={run.workdir}", f"--mount={run.folder}", "--pvc=claim", "--image=image"]
    _, jobset = manifests(stand_ins, f"{run.folder}/{mine}", *words, *options)
    container = pods_of(jobset)[2]
    image = tmp_path / "image"
    image.mkdir()
    for file in ("docker/verb.sh", "launch/forward.sh"):
        shutil.copy(ROOT / file, image)
    own_config = ("/own_config/", f"{run.folder}/configs/")  # where it is mounted
    command = [
        image / "verb.sh",
        *(expand(word).replace(*own_config) for word in container["args"]),
    ]
    given = run.environment | {each["name"]: expand(each["value"]) for each in container["env"]}
    given["PATH"] = f"{run.installed_at}/bin:{os.environ['PATH']}"
    given["T5X_DIFFEQ_CACHE"] = str(tmp_path / "cache")
    for seconds, status in ((1, 42), (0, 0)):
        run.set(seconds=seconds)
        port = {"JAX_COORDINATOR_PORT": str(free_ports(1)[0])}
        started = [
            subprocess.Popen(
                command,
                env={**given, **port, **own},
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for own in pods
        ]
        if status:
            wait_for(lambda pod=started[0]: run.step() >= 3 or pod.poll() is not None)
            started[1].terminate()
        logs = [pod.communicate(timeout=patience(240))[0] for pod in started]
        assert [pod.returncode for pod in started] == [status] * 2, logs
        assert "2 x cpu, 2 process(es)" in logs[0]
    assert [report["step"] for report in run.reports()] == list(range(1, STEPS + 1))
