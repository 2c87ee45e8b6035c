"""launch/tpu_pod.sh with the real `gcloud`, its ssh and two hosts.

What stands in is Google's side (`cloud_tpu.py`); the devices are the CPU's.
"""

import contextlib
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import warm_python
from cloud_tpu import CloudTpu, find_missing
from launched_run import LaunchedRun
from patience import patience, wait_for
from ssh_server import make_key
from stand_ins import slow_training
from tpu_api import PROJECT, ZONE

pytestmark = [
    pytest.mark.slow,
    pytest.mark.in_turns,
    pytest.mark.skipif(bool(find_missing()), reason=find_missing()),
]
NAME = "--name=a-tpu"
HERE = (NAME, f"--zone={ZONE}")
RUN = ("configs/llama1b.py", NAME, "--type=v5p-16", "--workdir=gs://bucket/run", "--unchecked")
GRANTED = {"tpu": {"nodeSpec": [{"nodeId": "a-tpu", "node": {"acceleratorType": "v5p-16"}}]}}
AT_ONCE = '[ "${2:-}" != t5x_diffeq.train ] || exit 0\n'  # a training that is done


@pytest.fixture
def cloud(tmp_path):
    with CloudTpu(tmp_path / "cloud") as cloud:
        yield cloud


@pytest.fixture
def run(tmp_path):
    return LaunchedRun(tmp_path / "run")


def really():
    """Trainings are those of `slow_train.py`."""
    return slow_training(warm_python.executable())


def words_of(run):
    """A training whose workdir is mounted on the hosts."""
    return [*run.words, f"--workdir={run.workdir}", "--mounted", "--type=v5p-16", *HERE]


@contextlib.contextmanager
def ssh_agent(folder: Path):
    """The variables of an agent that holds a key of one's own."""
    make_key(folder / "key")
    agent = {"SSH_AUTH_SOCK": str(folder / "agent")}
    command = ["ssh-agent", "-D", "-a", agent["SSH_AUTH_SOCK"]]
    running = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        wait_for(Path(agent["SSH_AUTH_SOCK"]).exists)
        given = {**os.environ, **agent}
        subprocess.run(["ssh-add", "-q", folder / "key"], env=given, check=True)
        yield agent
    finally:
        running.terminate()
        running.wait()


def assert_last_line(launched, status, message):
    """It ended so, and its last line says why."""
    assert launched.wait() == status, launched.log()
    last = launched.log().rstrip().splitlines()[-1]
    assert last.startswith("error: ") and message in last, launched.log()


def test_preempted(cloud, run):
    """The TPU is granted after a while, and taken away with its hosts; the run goes on anew."""
    run.set(seconds=0.3)
    cloud.begin_hosts(really())
    options = ("--spot", "--secret=TOKEN=its-name")
    launched = cloud.launch(*words_of(run), *options, cwd=run.folder)
    launched.wait_for_text("step 12/")
    run.set(seconds=60)  # until it is taken away
    for host in cloud.hosts:
        (training,) = host.processes("slow_train.py")
        assert training.environ()["TOKEN"] == "it's $(secret)"
    wait_for((run.workdir / "checkpoints" / "10").is_dir)
    cloud.preempt("a-tpu")
    launched.wait_for_text("requesting", after="TPU a-tpu: SUSPENDED")
    run.set(seconds=0)
    cloud.begin_hosts(really())
    assert launched.wait() == 0, launched.log()
    assert run.is_done()
    log = launched.log()
    once = ["WAITING_FOR_RESOURCES", "PROVISIONING", "ACTIVE"]
    states = re.findall(r"TPU a-tpu: (\w+)", log)
    assert states == [*once, "SUSPENDED", "DELETING", "none", *once]
    again = "unreachable: starting again (1 of at most 100)"
    assert "continuing at step 10 in " in log.partition(again)[2]
    assert log.count("2 x cpu, 2 process(es)") == 2
    requests = cloud.api.asked("POST .*/queuedResources$")
    assert [request.body["spot"] for request in requests] == [{}, {}]
    for call in cloud.ssh_calls():  # a host that froze is noticed
        assert "-o ServerAliveInterval=15 -o ServerAliveCountMax=4" in call


def test_errors_do_not_end_the_wait(cloud):
    """The TPU would be granted later, and paid for, with nobody to use it."""
    cloud.begin_hosts(AT_ONCE)
    waiting = "WAITING_FOR_RESOURCES"
    # `gcloud` asks 6 times if the answer is 503, and once if it is 429.
    cloud.api.states = [waiting, *[503] * 6, waiting, 429, "ACTIVE"]
    launched = cloud.run(*RUN, f"--zone={ZONE}")
    assert launched.wait() == 0, launched.log()
    states = re.findall(r"TPU a-tpu: (\w+)", launched.log())
    assert states == [waiting, "unknown", waiting, "unknown", "ACTIVE"]
    assert "The service is currently unavailable" in launched.log()
    assert "RESOURCE_EXHAUSTED: Quota exceeded" in launched.log()
    assert len(cloud.api.asked("POST .*/queuedResources$")) == 1


def test_denied(cloud):
    launched = cloud.run(*RUN, "--zone=nowhere")
    assert_last_line(launched, 1, "gcloud can't tell the state of the TPU a-tpu")
    assert "PERMISSION_DENIED: Permission denied on 'locations/nowhere'" in launched.log()
    cloud.api.fail("POST .*/queuedResources", 429, times=1)
    launched = cloud.run(*RUN, f"--zone={ZONE}")
    assert_last_line(launched, 1, "the TPU a-tpu can't be requested; the lines above say why")
    assert "RESOURCE_EXHAUSTED: Quota exceeded" in launched.log()


def test_refused(cloud):
    """The TPU is reserved, in the zone that `gcloud` has configured; what is printed clears it."""
    cloud.configure("compute/zone", ZONE)
    cloud.api.states = ["FAILED"]
    launched = cloud.run(*RUN, "--reserved")
    assert_last_line(launched, 1, "the TPU a-tpu was refused")
    assert "There is no more capacity" in launched.log()
    (create,) = cloud.api.asked("POST .*/queuedResources$")
    place = f"projects/{PROJECT}/locations/{ZONE}"
    assert create.body["reservationName"] == f"{place}/reservations/-"
    assert create.resource() == f"{place}/queuedResources"
    (told,) = re.findall("'(.*)' clears it", launched.log())
    assert cloud.run(*shlex.split(told)[1:]).wait() == 0
    status = cloud.run("status", NAME)
    assert (status.wait(), status.log()) == (0, "DELETING\n")
    status = cloud.run("status", NAME)
    assert (status.wait(), status.log()) == (0, "none\n")


def test_what_a_person_does(cloud, run, tmp_path):
    """Their agent lacks the key of `gcloud`. They press Ctrl-C, look, stop and delete."""
    run.set(seconds=patience(2))  # it must not end before it is stopped
    cloud.api.states = ["ACTIVE"]
    cloud.api.add("a-tpu", GRANTED)
    cloud.begin_hosts(really())
    with ssh_agent(tmp_path) as agent:
        launched = cloud.launch(*words_of(run), cwd=run.folder, **agent)
        launched.wait_for_text("first step done")
        launched.interrupt()
        assert launched.wait() == 130, launched.log()
        assert "of 3 failed" not in launched.log()
        assert "the run goes on; stop it with: " in launched.log()

        # On another machine `gcloud` makes a key first, and says so where the host answers.
        elsewhere = cloud.launch(*words_of(run), cwd=run.folder, HOME=str(tmp_path))
        elsewhere.wait_for_text("first step done", after="a run is there already")
        elsewhere.interrupt()
        assert elsewhere.wait() == 130, elsewhere.log()

        step = run.step()
        logs = cloud.launch("logs", "--worker=0", *HERE)
        logs.wait_for_text(f"step {step + 2:2}/")
        logs.interrupt()
        assert logs.wait() == 130, logs.log()

        status = cloud.run("status", *HERE)
        assert status.wait() == 0
        assert status.log().startswith("ACTIVE\n")
        assert status.log().count(": running | ") == 2, status.log()

        stop = cloud.run("stop", *HERE)
        assert (stop.wait(), stop.log().count("stopped 42\n")) == (0, 2), stop.log()
        assert (run.workdir / "checkpoints" / str(run.step())).is_dir()
        assert cloud.run("delete", *HERE).wait() == 0
        assert len(cloud.api.asked("DELETE")) == 1
