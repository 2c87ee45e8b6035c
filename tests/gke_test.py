"""launch/gke.sh: its manifests against schemas of Kubernetes and JobSet, and what it refuses.

All manifests here are those that --dry-run prints; kubectl_test.py applies them.
"""

import importlib.util
import re
import shlex

import pytest
import yaml
from helpers import ROOT
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

OPTIONAL = (
    "--queue=q",
    "--priority=urgent",
    "--service-account=robot",
    "--spot",
    "--namespace=ns",
    "--max_run_duration=2h",
    "--pvc=claim",
    "--env=KEY=value",
    "--secret=hidden",
    "--pod_network",
    "--gcsfuse",
    "--run_as_root",
)
DATA_OPTIONAL = (
    *("--pvc=claim", "--env=KEY=value", "--secret=hidden", "--spot", "--queue=q"),
    *("--gcsfuse", "--run_as_root"),
)
# Constants of Kueue (pkg/controller/constants/constants.go): QueueLabel,
# WorkloadPriorityClassLabel, and ProvReqAnnotationPrefix, whose annotations become parameters of
# a ProvisioningRequest.
KUEUE_LABELS = {"kueue.x-k8s.io/queue-name", "kueue.x-k8s.io/priority-class"}
KUEUE_PARAMETERS = "provreq.kueue.x-k8s.io/"


def render():
    path = ROOT / "launch" / "gke" / "render.py"
    spec = importlib.util.spec_from_file_location("render", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.render


@pytest.mark.parametrize("optional", [(), OPTIONAL])
@pytest.mark.parametrize("arguments", [TPU, GPU])
def test_manifests_are_valid(stand_ins, arguments, optional):
    (document,) = manifests(stand_ins, *arguments, *optional, "--image=image")
    assert document["kind"] == "JobSet"
    check(document)
    text = yaml.safe_dump(document)
    for value in (
        "robot",
        "kueue.x-k8s.io/queue-name: q",
        "kueue.x-k8s.io/priority-class: urgent",
        f"{KUEUE_PARAMETERS}maxRunDurationSeconds: '7200'",
        "gke-spot: 'true'",
        "namespace: ns",
        "claimName: claim",
        "fsGroup: 1000",
        "gke-gcsfuse/volumes: 'true'",
        "runAsUser: 0",
        "name: hidden",
        "value: value",
    ):
        assert (value in text) == bool(optional), value
    labels = {key for key in document["metadata"]["labels"] if "kueue" in key}
    assert labels == (KUEUE_LABELS if optional else set())


def test_slices_hosts_and_chips(stand_ins):
    (jobset,) = manifests(stand_ins, *TPU, "--image=image", "--restarts=7", "--grace=99")
    job, pod, container = pods_of(jobset)
    assert jobset["spec"]["replicatedJobs"][0]["replicas"] == 2
    assert (job["completions"], job["parallelism"]) == (16, 16)
    assert container["resources"]["limits"] == {"google.com/tpu": 4}
    assert pod["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": "tpu-v5p-slice",
        "cloud.google.com/gke-tpu-topology": "4x4x4",
    }
    assert jobset["spec"]["failurePolicy"]["maxRestarts"] == 7
    assert pod["terminationGracePeriodSeconds"] == 99
    small = (CONFIG, "--topology=1x1", WORKDIR, "--type=v6e", "--unchecked")
    (one,) = manifests(stand_ins, *small, "--image=i")
    job, _, container = pods_of(one)
    assert job["completions"] == 1
    assert container["resources"]["limits"] == {"google.com/tpu": 1}


def test_nodes_and_gpus(stand_ins):
    """All pods of all nodes are one Job of a JobSet: if one ends, all start again."""
    (jobset,) = manifests(stand_ins, *GPU, "--image=image")
    job, pod, container = pods_of(jobset)
    assert (job["completions"], job["parallelism"], job["backoffLimit"]) == (3, 3, 6)
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}
    assert pod["nodeSelector"] == {"cloud.google.com/gke-accelerator": "nvidia-h100-80gb"}
    variables = {each["name"]: each["value"] for each in container["env"]}
    # JobSet names its pods JOBSET-REPLICATED_JOB-INDEX-POD_INDEX, in a subdomain of its own name.
    assert variables["JAX_COORDINATOR_ADDRESS"] == "llama1b-node-0-0.llama1b:8476"
    assert variables["JAX_NUM_PROCESSES"] == "3"


@pytest.mark.parametrize(
    ("more", "wanted"),
    [
        (("--slices=1", "--service_account=robot"), None),
        (("--slices=2",), True),
        (("--slices=2", "--pod_network", "--service_account=robot"), None),
    ],
)
def test_several_slices_use_the_network_of_their_hosts(stand_ins, more, wanted):
    """There Workload Identity does not reach, so that it is told whose access is needed."""
    (jobset,) = manifests(stand_ins, *TPU, *more, "--image=image")
    pod = pods_of(jobset)[1]
    assert pod.get("hostNetwork") is wanted
    assert ("dnsPolicy" in pod) == bool(wanted)
    assert pod.get("serviceAccountName") == (None if wanted else "robot")
    told = stand_ins.run("gke.sh", *TPU, *more, "--image=image", "--dry-run").stderr
    note = "act as the account of their node pools; it needs access to gs://bucket/run"
    assert (note in told) == bool(wanted)


@pytest.mark.parametrize(("given", "seconds"), [((), "14400"), (("9",), "9")])
def test_pods_wait_for_one_whose_machine_is_being_mended(stand_ins, given, seconds):
    more = [f"--env=T5X_DIFFEQ_ARRIVAL_SECONDS={each}" for each in given]
    (jobset,) = manifests(stand_ins, *TPU, *more, "--image=image")
    variables = [(each["name"], each["value"]) for each in pods_of(jobset)[2]["env"]]
    assert [value for name, value in variables if "ARRIVAL" in name] == [seconds]


def test_logs_of_the_tpu_go_where_the_user_can_write(stand_ins):
    """GKE mounts its own folder at libtpu's default, /tmp/tpu_logs."""
    (jobset,) = manifests(stand_ins, *TPU, "--image=image")
    _, pod, container = pods_of(jobset)
    variables = {each["name"]: each["value"] for each in container["env"]}
    (mounted,) = (each for each in container["volumeMounts"] if each["name"] == "tpu-logs")
    assert mounted["mountPath"] == variables["TPU_LOG_DIR"]
    assert {"name": "tpu-logs", "emptyDir": {}} in pod["volumes"]
    (jobset,) = manifests(stand_ins, *GPU, "--image=image")
    assert "tpu" not in yaml.safe_dump(pods_of(jobset)[1])


@pytest.mark.parametrize("arguments", [TPU, GPU])
@pytest.mark.parametrize(
    ("kind", "label", "taints"),
    [
        ("--spot", "gke-spot", {"gke-spot"}),
        ("--flex_start", "gke-flex-start", {"gke-flex-start", "gke-queued"}),
    ],
)
def test_cheaper_nodes(stand_ins, arguments, kind, label, taints):
    """Their labels, and the taints by which GKE keeps other pods off them."""
    (jobset,) = manifests(stand_ins, *arguments, kind, "--image=image")
    pod = pods_of(jobset)[1]
    assert pod["nodeSelector"][f"cloud.google.com/{label}"] == "true"
    accelerator = "google.com/tpu" if arguments is TPU else "nvidia.com/gpu"
    tolerated = {each["key"] for each in pod["tolerations"]}
    assert tolerated == {accelerator, *(f"cloud.google.com/{taint}" for taint in taints)}


def test_spot_nodes_give_fifteen_seconds(stand_ins):
    """GKE: "the first 15 seconds for shutting down your Pods", 120 where the pool is set so."""
    (jobset,) = manifests(stand_ins, *TPU, "--spot", "--image=image")
    assert pods_of(jobset)[1]["terminationGracePeriodSeconds"] == 15
    ended = stand_ins.run("gke.sh", *TPU, "--spot", "--grace=60", "--image=i", "--dry-run")
    assert ended.returncode == 0
    assert "by default they give 15" in ended.stderr
    ended = stand_ins.run("gke.sh", *TPU, "--spot", "--grace=300", "--image=i", "--dry-run")
    assert_one_error(ended, 2, "15 seconds, and 120 at the most")


def test_disk_for_copies_of_shards(stand_ins):
    (jobset,) = manifests(stand_ins, *TPU, "--cache_gib=50", "--image=image")
    _, pod, container = pods_of(jobset)
    assert container["resources"]["requests"] == {"ephemeral-storage": "60Gi"}
    (cache,) = (volume for volume in pod["volumes"] if volume["name"] == "cache")
    assert cache["emptyDir"]["sizeLimit"] == "60Gi"
    assert {"name": "T5X_DIFFEQ_CACHE_GIB", "value": "50"} in container["env"]


def test_variables_and_secrets(stand_ins):
    given = ("--env=HERE", "--env=A=$(HOME) 'x'=$y", "--secret=one", "--secret=two")
    ended = stand_ins.run("gke.sh", *TPU, *given, "--image=i", "--dry-run", HERE="from outside")
    (_, text) = ended.stdout.split("--filename=-\n")
    jobset = yaml.safe_load(re.split(r"(?m)^\+ ", text)[0])
    container = pods_of(jobset)[2]
    variables = {each["name"]: expand(each["value"]) for each in container["env"]}
    assert variables["HERE"] == "from outside"
    assert variables["A"] == "$(HOME) 'x'=$y"
    assert [each["secretRef"]["name"] for each in container["envFrom"]] == ["one", "two"]


@pytest.mark.parametrize("variant", ["", ":ode"])
def test_a_config_of_ones_own_is_sent_along(stand_ins, tmp_path, variant):
    """The file itself, though the project has one of that name."""
    mine = tmp_path / "elsewhere" / "llama1b.py"
    mine.parent.mkdir()
    mine.write_text('# mine: ${NAME} $(x) "quoted" é 😀\n')
    words = (f"{mine}{variant}", *TPU[1:], "--image=i")
    config, jobset = manifests(stand_ins, *words)
    check(config)
    check(jobset)
    assert config["data"]["llama1b.py"] == mine.read_text().rstrip("\n")
    _, pod, container = pods_of(jobset)
    assert container["args"][1] == f"--config=/own_config/llama1b.py{variant}"
    (mounted,) = (each for each in container["volumeMounts"] if each["name"] == "config")
    assert mounted["mountPath"] == "/own_config"
    (volume,) = (each for each in pod["volumes"] if each["name"] == "config")
    assert volume["configMap"]["name"] == config["metadata"]["name"]


ENDS = [  # of a pod: its status, whether its node was preempted, drained or lost, and what follows
    (1, False, "FailJobSet"),
    (2, False, "FailJobSet"),
    (130, False, "FailJobSet"),
    (1, True, "FailJobSet"),  # what would happen on another node too
    (42, False, "RestartJobSetAndIgnoreMaxRestarts"),
    (42, True, "RestartJobSetAndIgnoreMaxRestarts"),
    (137, True, "RestartJobSetAndIgnoreMaxRestarts"),
    (143, True, "RestartJobSetAndIgnoreMaxRestarts"),
    (175, True, "RestartJobSetAndIgnoreMaxRestarts"),
    (None, True, "RestartJobSetAndIgnoreMaxRestarts"),
    (None, False, ""),  # refused by its node
    (175, False, "RestartJobSet"),
    *((128 + number, False, "RestartJobSet") for number in (6, 7, 8, 9, 11, 15)),
]


@pytest.mark.parametrize("arguments", [TPU, GPU])
def test_what_follows_when_a_pod_ends(stand_ins, arguments):
    """Preemption and maintenance don't use up the restarts."""
    (document,) = manifests(stand_ins, *arguments, "--image=image")
    _, _, container = pods_of(document)
    for status, disrupted, action in ENDS:
        assert what_follows(document, status, disrupted) == action, (status, disrupted)
    codes = [each["onExitCodes"] for each in rules_of_pods(document) if "onExitCodes" in each]
    assert {each["containerName"] for each in codes} == {container["name"]}


@pytest.mark.parametrize("arguments", [TPU, GPU])
def test_arguments_reach_the_program_as_written(stand_ins, arguments):
    odd = "--config.data.tokenizer=$$(HOME) ${HOME} $$ - : # 'x' {y} 😀"
    (document,) = manifests(stand_ins, *arguments, ODD, odd, "--image=image")
    args = pods_of(document)[2]["args"]
    assert [expand(argument) for argument in args] == [
        *("train", "--config=configs/llama1b.py", "--workdir=gs://bucket/run", ODD, odd),
    ]
    assert not list(stand_ins.folder.rglob("pwned"))


def test_data_as_an_indexed_job(stand_ins):
    arguments = ("gke", "configs/tiny.py", "--output=gs://bucket/shards", "--parts=4", "--image=i")
    parts, finish = manifests(stand_ins, *arguments, ODD, script="prepare_data.sh")
    check(parts)
    check(finish)
    full = manifests(stand_ins, *arguments, *DATA_OPTIONAL, script="prepare_data.sh")
    for document in full:
        check(document)
    for value in ("claimName: claim", "gke-gcsfuse/volumes: 'true'", "runAsUser: 0"):
        assert value in yaml.safe_dump(full)
    assert (parts["spec"]["completions"], finish["spec"]["completions"]) == (4, 1)
    (container,) = parts["spec"]["template"]["spec"]["containers"]
    (last,) = finish["spec"]["template"]["spec"]["containers"]
    assert container["args"].pop(1) == "--shard=$(PART)/4"
    assert container["args"] == last["args"]
    assert "PART" in [variable["name"] for variable in container["env"]]


def test_placeholders_and_values_match():
    filled = render()
    with pytest.raises(ValueError, match="'B', 'C'"):
        filled("a: ${A}\nb: ${B}", {"A": "1", "C": "2"}, [])
    with pytest.raises(ValueError, match="'ENV'"):
        filled("a: 1", {}, [], {"ENV": ["x=1"]})
    with pytest.raises(ValueError, match="has no `# end`"):
        filled("# if A\na: 1", {"A": "1"}, [])
    text = "a: ${A}\nb: ${B}\nc: ${C}\n# each ARGUMENTS\n- ${VALUE}\n# end"
    values = {"A": "007", "B": "", "C": "7"}
    assert filled(text, values, ["x", "y"]) == 'a: "007"\nc: 7\n- "x"\n- "y"\n'


def test_blocks():
    filled = render()
    text = "# if A\na\n  # each E\n  ${KEY}: ${VALUE}\n  # end\n# end\n# if E\nb\n# end"
    assert filled(text, {"A": "1"}, [], {"E": ["k=$v", "l="]}) == 'a\n  "k": "$$v"\n  "l": ""\nb\n'
    assert filled(text, {"A": ""}, [], {"E": ["k=v"]}) == "b\n"
    assert filled(text, {"A": "1"}, []) == "a\n"


def documented():
    """The commands of docs/launch/gke.md that start runs."""
    text = (ROOT / "docs" / "launch" / "gke.md").read_text().replace("\\\n", "")
    return [shlex.split(each) for each in re.findall(r"(?m)^launch/gke\.sh (.*)$", text)]


@pytest.mark.parametrize("words", documented(), ids=lambda words: f"{len(words)} words")
def test_documented_commands_are_taken(stand_ins, words):
    (jobset,) = manifests(stand_ins, *words, "--unchecked")
    check(jobset)


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (TPU, "give --image=IMAGE, or --build=REPOSITORY"),
        ((CONFIG, WORKDIR, "--unchecked", "--image=i"), "give --topology=4x4x4 for TPU slices"),
        ((*TPU, "--chips-per-host=3", "--image=i"), "has 64 chips, which are not whole hosts"),
        ((*TPU, "--name=" + "x" * 41, "--image=i"), "at most 40"),
        ((*TPU, "--spot", "--flex_start", "--image=i"), "exclude each other"),
        ((*TPU, "--workdir=/folder", "--image=i"), "a pod loses its own folders when it ends"),
        ((*TPU, "--workdir=/shared/run", "--image=i"), "give --pvc=CLAIM, the volume"),
        ((*TPU, "--service_account=robot", "--image=i"), "robot has no effect on several slices"),
        ((*TPU, "--pvc=claim", "--gcsfuse", "--image=i"), "add --pod_network, which is slower"),
        ((*GPU, "--gcsfuse", "--image=i"), "give --pvc=CLAIM, the volume that --gcsfuse"),
        ((*TPU, "--env=NOT_SET_HERE", "--image=i"), "there is no variable NOT_SET_HERE here"),
        ((*TPU, "--max_run_duration=2", "--image=i"), "must be like 90s, 30m, 24h or 7d"),
    ],
)
def test_bad_arguments(stand_ins, arguments, message):
    assert_one_error(stand_ins.run("gke.sh", *arguments), 2, message)
    assert stand_ins.calls() == []
