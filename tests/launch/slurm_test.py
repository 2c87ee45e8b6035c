"""launch/gpu_slurm.sh and prepare_data.sh on a real SLURM: jobs that are interrupted go back into
the queue and on from what they saved, or end with the right status."""

import json
import os
import signal
import subprocess
from functools import partial

import pytest
from helpers import ROOT
from launched_run import LaunchedRun, steps_after_stops
from patience import patience
from slurm_cluster import Cluster, find_missing

pytestmark = [
    pytest.mark.slow,
    pytest.mark.in_turns,
    pytest.mark.skipif(bool(find_missing()), reason=find_missing()),
]
ENDED_FOR_GOOD = ("COMPLETED", "FAILED", "CANCELLED")
ENDED = (*ENDED_FOR_GOOD, "TIMEOUT", "NODE_FAIL", "PREEMPTED")


@pytest.fixture(scope="module")
def cluster():
    with Cluster() as cluster:
        yield cluster


def submit(cluster: Cluster, run: LaunchedRun, script: str, *arguments: str) -> str:
    """What the script says, which ends well."""
    log = run.folder / "submitted"
    process = run.launch(script, *arguments, log=log, **cluster.environment)
    assert process.wait(timeout=patience(300)) == 0, log.read_text()
    return log.read_text()


class Job:
    """A run that was submitted to two nodes."""

    def __init__(self, cluster: Cluster, run: LaunchedRun, *options: str):
        self.cluster, self.run = cluster, run
        further = list(options[options.index("--") :]) if "--" in options else []
        own = options[: len(options) - len(further)]
        place = ["--nodes=2", "--gpus_per_node=0", "--name=test"]
        said = submit(cluster, run, "gpu_slurm.sh", *run.words, *place, *own, *further)
        self.id = said.split()[1]

    def log(self) -> str:
        path = self.run.folder / f"test-{self.id}.log"
        return path.read_text() if path.exists() else ""

    def tell(self, *command: str) -> None:
        """scancel, scontrol ... of this job."""
        self.cluster.ask(*command, self.id)

    def state(self) -> dict[str, str]:
        return self.cluster.state(self.id)

    def state_on_its_way(self) -> dict[str, str]:
        """The state of a job that has not ended for good."""
        state = self.state()
        assert state["JobState"] not in ENDED_FOR_GOOD, f"{state}\n{self.log()}"
        return state

    def wait_until_training(self, again: int = 0, step: int = 3) -> None:
        """Returns when it trains, started again so often."""

        def is_so():
            state = self.state_on_its_way()
            new = int(state["Restarts"]) == again and state["JobState"] == "RUNNING"
            return new and self.log().count("first step done") > again and self.run.step() >= step

        self.cluster.wait_until(f"step {step}, again {again}", is_so)

    def wait_until_started(self, again: int) -> None:
        """Returns when it is back in the queue, or runs, after so many restarts."""

        def is_so():
            state = self.state_on_its_way()
            assert int(state["Restarts"]) <= again, f"{state}\n{self.log()}"
            return int(state["Restarts"]) == again

        self.cluster.wait_until(f"restart {again}", is_so)

    def limit(self, seconds: int) -> None:
        """The running job's time limit passes so many seconds from now; SLURM looks every 30."""
        self.cluster.ask("scontrol", "update", f"JobId={self.id}", f"EndTime=now+{seconds}seconds")

    def lift_limit(self) -> None:
        """Gives it an hour, running or in the queue, where it has kept what `limit` left it."""
        self.cluster.ask("scontrol", "update", f"JobId={self.id}", "TimeLimit=60")

    def wait_until_ended(self, state: str = "COMPLETED", status: str = "") -> str:
        """Returns its log when it has ended so."""
        self.cluster.wait_until("its end", lambda: self.state()["JobState"] in ENDED)
        assert self.state()["JobState"] == state, self.log()
        assert self.state()["ExitCode"].startswith(status), self.log()
        return self.log()


def test_limit_ahead_and_sigterm(cluster, tmp_path):
    """SLURM's USR1 ahead of the limit, then a person's SIGTERM: both save, requeue and go on."""
    run = LaunchedRun(tmp_path / "user")
    run.set(seconds=2)
    job = Job(cluster, run, "--grace=30")
    job.wait_until_training()
    # Without --cpus_per_task a task would have one CPU.
    assert [(run.folder / f"cpus-{n}").read_text() for n in (0, 1)] == [str(os.cpu_count())] * 2
    job.limit(65)  # SLURM sends the signal up to a minute earlier than asked
    cluster.wait_until("USR1", lambda: "the time limit is near" in job.log())
    job.wait_until_started(again=1)
    job.lift_limit()
    saved = run.step()
    run.set(seconds=0.5)
    job.wait_until_training(again=1, step=saved + 2)
    job.tell("scancel", "--signal=TERM")
    job.wait_until_started(again=2)
    run.set(seconds=0)
    log = job.wait_until_ended()
    assert log.count("2 x cpu, 2 process(es)") == 3
    assert log.count("saved; the job goes back into the queue") == 2
    assert log.count("stopped by SIGTERM") == 2
    stopped, continued = steps_after_stops(log)
    assert len(stopped) == 2 and stopped == continued
    assert run.is_done()


def test_lost_processes(cluster, tmp_path):
    """A task that is killed, and one that ends with 175, start the job again; --restarts times."""
    run = LaunchedRun(tmp_path / "user")
    run.set(seconds=0.5)
    job = Job(cluster, run, "--restarts=2")
    job.wait_until_training()
    run.set(fault="12 1 175")
    os.kill(run.processes()[1], signal.SIGKILL)
    job.wait_until_started(again=2)
    job.wait_until_training(again=2, step=15)  # at another step than before: else it is final
    os.kill(run.processes()[1], signal.SIGKILL)
    log = job.wait_until_ended("FAILED", "1:0")
    assert log.count("task 1: Exited with exit code 137") == 2
    assert log.count("task 1: Exited with exit code 175") == 1
    assert steps_after_stops(log) == ([], [10])  # the first was lost before its first checkpoint
    assert log.count("; the job goes back into the queue") == 2
    assert "but the job was already started again 2 times (--restarts)" in log


def test_ends_for_good(cluster, tmp_path):
    """A failure of one task, whatever becomes of the others; SIGINT; and scancel."""
    run = LaunchedRun(tmp_path / "user")
    run.set(seconds=0.5, fault="2 1 1")
    log = Job(cluster, run).wait_until_ended("FAILED", "1:0")
    assert "error: train ended with status 1; the lines above say why" in log
    job = Job(cluster, run)
    job.wait_until_training()
    job.tell("scancel", "--signal=INT")
    log = job.wait_until_ended("FAILED", "130:0")
    assert "stopped by Ctrl-C" in log
    assert "stopped and saved; submit it again to go on" in log
    job = Job(cluster, run)
    job.wait_until_training(step=run.step() + 2)
    job.tell("scancel")
    assert "goes back" not in job.wait_until_ended("CANCELLED")


def test_out_of_time_and_preempted(cluster, tmp_path):
    """A limit that passes; a job that takes the nodes, without time to save and with it."""
    run = LaunchedRun(tmp_path / "user")
    run.set(seconds=3)  # SLURM looks at limits every 30 seconds; the steps must outlast that
    job = Job(cluster, run, "--", "--signal=B:CONT@1")  # no warning
    job.wait_until_training()
    job.limit(1)
    job.wait_until_started(again=1)
    job.lift_limit()
    assert "the time limit has passed; the job goes back into the queue" in job.log()
    urgent = ("sbatch", "--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null")
    for again in (1, 2):
        job.wait_until_training(again=again, step=run.step() + 2)
        cluster.ask(*urgent, "--wrap=sleep 1")
        job.wait_until_started(again=again + 1)
        # The second time it is in the partition whose preemption leaves time to save.
        cluster.ask("scontrol", "update", f"JobId={job.id}", "Partition=graceful")
    run.set(seconds=0)
    log = job.wait_until_ended()
    assert log.count("saved; the job goes back into the queue") == 1
    stopped, continued = steps_after_stops(log)
    assert continued[-1] == stopped[-1]
    assert run.is_done()


def test_resources(cluster, tmp_path):
    """What the scheduler understood: CPUs shared by GPUs, memory, further options."""
    run = LaunchedRun(tmp_path / "user")
    cpus = max(2, os.cpu_count())
    words = ("gpu_slurm.sh", *run.words, "--nodes=2", "--gpus_per_node=2", "--mem=1G")
    job = submit(cluster, run, *words, "--", "--hold", "--comment=two words").split()[1]
    told = cluster.ask("scontrol", "show", "job", job)
    assert f"NumNodes=2-2 NumCPUs={2 * 2 * (cpus // 2)} NumTasks=4 CPUs/Task={cpus // 2}" in told
    assert "MinMemoryNode=1G" in told
    assert "TresPerNode=gres:gpu:2" in told
    assert "Comment=two words" in told
    assert f"WorkDir={run.folder}\n" in told
    cluster.ask("scancel", job)
    log = run.folder / "refused"
    process = run.launch(*words, "--partition=nope", log=log, **cluster.environment)
    assert process.wait() == 1
    assert "error: sbatch did not take the job; the lines above say why" in log.read_text()
    process = run.launch(*words, "--container=image", log=log, **cluster.environment)
    assert process.wait() == 2
    assert "the srun of this cluster has no --container-image (pyxis is not in" in log.read_text()


def test_sweep(cluster, tmp_path):
    """Two points, a job each: each saves on SIGTERM, goes back alone and goes on; the table."""
    run = LaunchedRun(tmp_path / "user")
    (config, _, *keys) = run.words
    place = ["--gpus_per_node=0", "--name=swept", "--cpus_per_task=1", "--jobs=2"]
    keys += ["--config.train.total_steps=2000", "--config.train.checkpoint_every=1000"]
    words = (config, "--output=out", "--grid=optimizer.learning_rate=1e-3,2e-3", *keys)
    job = submit(cluster, run, "gpu_slurm.sh", *words, *place).split()[1]
    jobs = [f"{job}_{number}" for number in (0, 1)]
    output = run.folder / "out"

    def steps():
        files = sorted(output.glob("*/metrics.jsonl"))
        return [path.read_text().count("train/loss") for path in files]

    def states(key="JobState"):
        return [cluster.state(each)[key] for each in jobs]

    def logs():
        paths = (*run.folder.glob("swept-*.log"), *output.glob("*.log"))
        return "\n".join(path.read_text() for path in paths)

    def trains(number):
        assert cluster.state(jobs[number])["JobState"] not in ENDED_FOR_GOOD, logs()
        lines = output / f"learning_rate=0.00{number + 1}-seed=0" / "metrics.jsonl"
        return lines.exists() and lines.read_text().count("\n") > 3

    for number, each in enumerate(jobs):
        cluster.wait_until(f"a training of {each}", partial(trains, number))
    # The last one first: its job ID is also that of the whole array.
    cluster.ask("scancel", "--signal=TERM", jobs[1])
    cluster.wait_until("one restart", lambda: states("Restarts")[1] == "1")
    assert states("Restarts") == ["0", "1"], logs()
    cluster.ask("scancel", "--signal=TERM", jobs[0])
    cluster.wait_until("the other restart", lambda: states("Restarts") == ["1", "1"])
    cluster.wait_until("its end", lambda: all(state in ENDED for state in states()))
    assert states() == ["COMPLETED"] * 2, logs()
    assert logs().count("saved; the job goes back into the queue") == 2, logs()
    assert logs().count("stopped by SIGTERM after step") == 2, logs()
    assert steps() == [2000, 2000]
    found = [json.loads((output / f"results-{n}.jsonl").read_text()) for n in (0, 1)]
    assert [each["optimizer.learning_rate"] for each in found] == [0.001, 0.002]
    assert (output / "sweep.md").read_text().count("1 of 1") == 2


def test_prepare_data(cluster, tmp_path):
    """Parts as a job array, then the job that checks them: the shards of one process."""
    run = LaunchedRun(tmp_path / "user")
    (config, _, data, *_) = run.words
    options = ("--parts=2", "--shards=4", "--cpus=1", "--name=data")
    words = ("prepare_data.sh", "slurm", config, "--output=shards", data)
    said = submit(cluster, run, *words, *options)
    first, last = (word for word in said.split() if word.isdecimal())
    cluster.wait_until("the shards", lambda: cluster.state(last)["JobState"] in ENDED)
    logs = {path.name: path.read_text() for path in run.folder.glob("data*.log")}
    assert cluster.state(last)["JobState"] == "COMPLETED", logs
    assert all("this part is complete" in logs[f"data-{first}-{part}.log"] for part in (0, 1))
    assert "8 of 8 shards are there already" in logs[f"data-finish-{last}.log"]
    alone = [run.folder / "venv" / "bin" / "python", "-m", "t5x_diffeq.prepare_data"]
    alone += [f"--config={config}", "--output=alone", data, "--shards=4", "--workers=1"]
    environment = {**run.environment, "PYTHONPATH": str(ROOT)}
    subprocess.run(alone, cwd=run.folder, env=environment, check=True, capture_output=True)
    found, expected = (
        {
            file.relative_to(folder): file.read_bytes()
            for file in folder.rglob("*")
            if file.is_file() and not file.name.startswith(".lock")
        }
        for folder in (run.folder / "shards", run.folder / "alone")
    )
    assert found == expected
