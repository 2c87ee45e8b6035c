"""launch/gke.sh: its manifests against schemas of Kubernetes and JobSet, and what it refuses.

All manifests here are those that --dry-run prints; kubectl_test.py applies them.
"""

import pytest
import yaml
from manifests import (
    CONFIG,
    GPU,
    TPU,
    WORKDIR,
    check,
    expand,
    manifests,
    pods_of,
    rules_of_pods,
    what_follows,
)
from stand_ins import ODD, assert_one_error

pytestmark = pytest.mark.slow

OPTIONAL = {  # an option, and what stands in the manifest for it
    "--queue=q": "kueue.x-k8s.io/queue-name: q",
    "--priority=urgent": "kueue.x-k8s.io/priority-class: urgent",
    "--service-account=robot": "serviceAccountName: robot",
    "--namespace=ns": "namespace: ns",
    "--max_run_duration=2h": "provreq.kueue.x-k8s.io/maxRunDurationSeconds: '7200'",
    "--pvc=claim": "claimName: claim",
    "--secret=hidden": "name: hidden",
    "--gcsfuse": "gke-gcsfuse/volumes: 'true'",
    "--run_as_root": "runAsUser: 0",
    "--reservation=r": "reservation-name: r",
    "--restarts=7": "maxRestarts: 7",
    "--grace=99": "terminationGracePeriodSeconds: 99",
    "--cache_gib=50": "ephemeral-storage: 60Gi",
}
OF_DATA = ("--queue=q", "--pvc=claim", "--secret=hidden", "--gcsfuse", "--run_as_root")


def variables_of(jobset):
    return {each["name"]: expand(each["value"]) for each in pods_of(jobset)[2]["env"]}


@pytest.mark.parametrize("arguments", [TPU, GPU])
def test_options_are_in_valid_manifests(stand_ins, arguments):
    more = [*OPTIONAL, "--pod_network"] if arguments is TPU else OPTIONAL
    (jobset,) = manifests(stand_ins, *arguments, *more, "--image=image")
    check(jobset)
    text = yaml.safe_dump(jobset)
    assert [wanted for wanted in OPTIONAL.values() if wanted not in text] == []
    (jobset,) = manifests(stand_ins, *arguments, "--image=image")
    text = yaml.safe_dump(jobset)
    assert [wanted for wanted in OPTIONAL.values() if wanted in text] == []


@pytest.mark.parametrize("kind", [TPU, GPU, "data"], ids=["tpu", "gpu", "data"])
def test_a_pod_has_no_more_rights_than_it_needs(stand_ins, kind):
    """The rules of Kubernetes' `restricted` standard; root keeps what makes it root."""
    data = (CONFIG, "--output=gs://bucket/shards", "--parts=1")
    for more in ((), ("--pvc=claim",), ("--run_as_root",)):
        if kind == "data":
            documents = manifests(
                stand_ins, "gke", *data, *more, "--image=i", script="prepare_data.sh"
            )
            pod = documents[0]["spec"]["template"]["spec"]
        else:
            (jobset,) = manifests(stand_ins, *kind, *more, "--image=i")
            pod = pods_of(jobset)[1]
        of_pod, (container,) = pod["securityContext"], pod["containers"]
        of_container = container["securityContext"]
        assert of_pod["seccompProfile"] == {"type": "RuntimeDefault"}
        assert of_container["allowPrivilegeEscalation"] is False
        assert of_pod.get("fsGroup") == (1000 if more == ("--pvc=claim",) else None)
        if more == ("--run_as_root",):
            assert of_container["runAsUser"] == 0 and "capabilities" not in of_container
            assert "runAsNonRoot" not in of_pod
        else:
            assert of_pod["runAsNonRoot"] is True and "runAsUser" not in of_container
            assert of_container["capabilities"] == {"drop": ["ALL"]}


def test_where_a_slice_writes_and_how_long_it_waits(stand_ins):
    """Where the user can write: GKE mounts its own folder at libtpu's default, /tmp/tpu_logs."""
    (jobset,) = manifests(stand_ins, *TPU, "--image=image")
    assert jobset["spec"]["replicatedJobs"][0]["replicas"] == 2
    pod, container, variables = *pods_of(jobset)[1:], variables_of(jobset)
    assert {"name": "tpu-logs", "mountPath": variables["TPU_LOG_DIR"]} in container["volumeMounts"]
    assert variables["T5X_DIFFEQ_ARRIVAL_SECONDS"] == "14400"
    assert pod["dnsPolicy"] == "ClusterFirstWithHostNet"
    # JobSet names its pods JOBSET-REPLICATED_JOB-INDEX-POD_INDEX, in a subdomain of its own name.
    variables = variables_of(manifests(stand_ins, *GPU, "--image=image")[0])
    assert variables["JAX_COORDINATOR_ADDRESS"] == "llama1b-node-0-0.llama1b:8476"
    assert variables["JAX_NUM_PROCESSES"] == "3"


SLICE = {"gke-tpu-accelerator": "tpu-v5p-slice", "gke-tpu-topology": "4x4x4"}
ONE_HOST = (CONFIG, "--topology=1x1", WORKDIR, "--type=v6e", "--unchecked")
ITS_CHIP = {"gke-tpu-accelerator": "tpu-v6e-slice", "gke-tpu-topology": "1x1"}
H100 = {"gke-accelerator": "nvidia-h100-80gb"}


@pytest.mark.parametrize(
    ("arguments", "pods", "chips", "labels", "taints"),
    [
        (TPU, 16, {"google.com/tpu": 4}, SLICE, ""),
        ((*TPU, "--spot"), 16, {"google.com/tpu": 4}, {**SLICE, "gke-spot": "true"}, "gke-spot"),
        (ONE_HOST, 1, {"google.com/tpu": 1}, ITS_CHIP, ""),
        (GPU, 3, {"nvidia.com/gpu": 8}, H100, ""),
        (
            *((*GPU, "--flex_start"), 3, {"nvidia.com/gpu": 8}),
            *({**H100, "gke-flex-start": "true"}, "gke-flex-start gke-queued"),
        ),
    ],
)
def test_pods_and_their_nodes(stand_ins, arguments, pods, chips, labels, taints):
    """All pods of a slice or of all nodes are one Job: if one ends, all start again. Several slices
    use the network of their hosts. Labels choose nodes, and GKE keeps other pods off by taints.

    GKE on Spot nodes: "the first 15 seconds for shutting down your Pods".
    """
    job, pod, container = pods_of(manifests(stand_ins, *arguments, "--image=image")[0])
    assert (job["completions"], job["parallelism"]) == (pods, pods)
    assert container["resources"]["limits"] == chips
    found = {key.removeprefix("cloud.google.com/"): x for key, x in pod["nodeSelector"].items()}
    assert found == labels
    tolerated = {each["key"].removeprefix("cloud.google.com/") for each in pod["tolerations"]}
    assert tolerated == {*chips, *taints.split()}
    assert pod.get("hostNetwork", False) == (pods == 16)
    assert pod["terminationGracePeriodSeconds"] == (15 if "--spot" in arguments else 300)


def test_words_and_variables_reach_the_program_as_written(stand_ins, monkeypatch):
    monkeypatch.setenv("HERE", "from outside")
    odd = "--config.data.tokenizer=$$(HOME) ${HOME} $$ - : # 'x' {y} 😀"
    given = ("--env=HERE", "--env=A=$(HOME) 'x'=$y", "--env=NUMBER=007")
    (jobset,) = manifests(stand_ins, *TPU, ODD, odd, *given, "--image=image")
    assert [expand(argument) for argument in pods_of(jobset)[2]["args"]] == [
        *("train", "--config=configs/llama1b.py", "--workdir=gs://bucket/run", ODD, odd)
    ]
    wanted = {"HERE": "NOT_SHOWN_BY_DRY_RUN", "A": "$(HOME) 'x'=$y", "NUMBER": "007"}
    assert wanted.items() <= variables_of(jobset).items()
    assert not list(stand_ins.folder.rglob("pwned"))


ENDS = [  # of a pod: its status, whether its node was preempted, drained or lost, and what follows
    (1, False, "FailJobSet"),
    (130, False, "FailJobSet"),
    (1, True, "FailJobSet"),  # what would happen on another node too
    (42, False, "RestartJobSetAndIgnoreMaxRestarts"),
    (143, True, "RestartJobSetAndIgnoreMaxRestarts"),
    (175, True, "RestartJobSetAndIgnoreMaxRestarts"),
    (None, True, "RestartJobSetAndIgnoreMaxRestarts"),
    (None, False, ""),  # refused by its node
    *((status, False, "RestartJobSet") for status in (134, 135, 136, 137, 139, 143, 175)),
]


def test_what_follows_when_a_pod_ends(stand_ins):
    """Preemption and maintenance don't use up the restarts."""
    (jobset,) = manifests(stand_ins, *GPU, "--image=image")
    for status, disrupted, action in ENDS:
        assert what_follows(jobset, status, disrupted) == action, (status, disrupted)
    codes = [each["onExitCodes"] for each in rules_of_pods(jobset) if "onExitCodes" in each]
    assert {each["containerName"] for each in codes} == {pods_of(jobset)[2]["name"]}


def test_data_as_an_indexed_job(stand_ins):
    arguments = ("gke", "configs/tiny.py", "--output=gs://bucket/shards", "--parts=4", "--image=i")
    jobs = manifests(stand_ins, *arguments, ODD, *OF_DATA, script="prepare_data.sh")
    for job in jobs:
        check(job)
        text = yaml.safe_dump(job)
        assert [OPTIONAL[each] for each in OF_DATA if OPTIONAL[each] not in text] == []
    parts, last = (job["spec"]["template"]["spec"]["containers"][0] for job in jobs)
    assert [job["spec"]["completions"] for job in jobs] == [4, 1]
    assert parts["args"].pop(1) == "--shard=$(PART)/4"
    assert parts["args"] == last["args"]
    assert expand(last["args"][-1]) == ODD
    assert "PART" in [variable["name"] for variable in parts["env"]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (TPU, "give --image=IMAGE, or --build=REPOSITORY"),
        ((*TPU[:1], WORKDIR, "--unchecked", "--image=i"), "give --topology=4x4x4 for TPU slices"),
        ((*TPU, "--chips-per-host=3", "--image=i"), "has 64 chips, which are not whole hosts"),
        ((*TPU, "--spot", "--grace=300", "--image=i"), "15 seconds, and 120 at the most"),
        ((*TPU, "--type=v5e"), "a v5e has two dimensions, such as 4x4"),
        ((TPU[0], WORKDIR, "--topology=4x4", "--image=i"), "a v5p has three dimensions"),
        ((*TPU, "--type=v5litepod"), "or GKE's name of a TPU, such as tpu-v5-lite-podslice"),
        ((*TPU, "--nodes=4"), "--nodes=4 is for --gpu; a TPU's --topology says how many hosts"),
        ((*TPU, "--mount=shared"), "--mount=shared must be a folder from /"),
        ((*TPU, "--secret=KEY=value", "--image=i", "--unchecked"), "--secret=KEY... must be the"),
        ((TPU[0], WORKDIR, "--gpu=h100"), "must be GKE's name of a GPU, such as nvidia-h100-80gb"),
        ((TPU[0], WORKDIR, "--gpu=nvidia-l4", "--slices=2"), "--gpu=nvidia-l4 has neither --sl"),
        (("delete", "--name=x"), "delete is no config; kubectl get, logs and delete jobset NAME"),
        ((*TPU, "--workdir=/folder", "--image=i"), "a pod loses its own folders when it ends"),
        ((*TPU, "--service_account=robot", "--image=i"), "robot has no effect on several slices"),
        ((*TPU, "--pvc=claim", "--gcsfuse", "--image=i"), "add --pod_network, which is slower"),
    ],
)
def test_bad_arguments(stand_ins, arguments, message):
    assert_one_error(stand_ins.run("gke.sh", *arguments), 2, message)
    assert stand_ins.calls() == []
