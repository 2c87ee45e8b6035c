"""launch/gke.sh: its manifests against Kubernetes' own schemas, and what it calls."""

import importlib.util
import re

import kubernetes_validate
import pytest
import yaml
from conftest import ROOT
from jsonschema import ValidationError, validate
from stand_ins import ODD, assert_one_error, stand_ins_fixture  # noqa: F401

KUBERNETES = "1.34"
TPU = ("configs/llama1b.py", "--topology=4x4x4", "--slices=2", "--workdir=gs://bucket/run")
GPU = ("configs/llama1b.py", "--gpu=nvidia-h100-80gb", "--nodes=3", "--workdir=gs://bucket/run")
OPTIONAL = (
    "--queue=q",
    "--service-account=robot",
    "--spot",
    "--reservation=mine",
    "--namespace=ns",
)
DONE = {"call": r"get (jobset|job)/", "out": "Completed Complete"}


def closed(required, **properties):
    """An object of these fields and no others."""
    return {
        "type": "object",
        "required": required.split(),
        "properties": properties,
        "additionalProperties": False,
    }


TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}
NUMBER = {"type": "integer", "minimum": 1}
METADATA = closed("name", name={"type": "string"}, namespace={}, labels=TEXTS, annotations=TEXTS)
RULE = closed(
    "action",
    name={"type": "string"},
    action={"enum": ["FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"]},
    onJobFailureReasons={
        "type": "array",
        "items": {"enum": ["BackoffLimitExceeded", "PodFailurePolicy"]},
    },
)
REPLICATED = closed(
    "name template", name={"type": "string"}, replicas=NUMBER, template=closed("spec", spec={})
)
JOBSET = closed(  # as far as ours goes; the Job inside is checked by Kubernetes' schema
    "apiVersion kind metadata spec",
    apiVersion={"const": "jobset.x-k8s.io/v1alpha2"},
    kind={"const": "JobSet"},
    metadata=METADATA,
    spec=closed(
        "replicatedJobs",
        failurePolicy=closed(
            "maxRestarts", maxRestarts=NUMBER, rules={"type": "array", "items": RULE}
        ),
        replicatedJobs={"type": "array", "items": REPLICATED},
    ),
)


def render():
    path = ROOT / "launch" / "gke" / "render.py"
    spec = importlib.util.spec_from_file_location("render", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.render


def manifests(stand_ins, *arguments, script="gke.sh"):
    """What --dry-run prints, without the commands."""
    ended = stand_ins.run(script, *arguments, "--dry-run")
    assert ended.returncode == 0, ended.stderr
    assert stand_ins.calls() == []
    documents = re.split(r"^\+ .*\n|^---\n", ended.stdout, flags=re.MULTILINE)
    return [document for text in documents if (document := yaml.safe_load(text))]


def check(document):
    """Strictly: a field that the schema doesn't know fails."""
    if document["kind"] == "JobSet":
        validate(document, JOBSET)
        job = document["spec"]["replicatedJobs"][0]["template"]
        check({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, **job})
    else:
        kubernetes_validate.validate(document, KUBERNETES, strict=True)


def expanded(argument):
    """A container's argument as Kubernetes passes it on, without variables of that name."""
    return re.sub(r"\$(\$|\(\w+\))", lambda m: "$" if m[1] == "$" else "WRONG", argument)


@pytest.mark.parametrize("optional", [(), OPTIONAL])
@pytest.mark.parametrize("arguments", [TPU, GPU])
def test_manifests_are_valid(stand_ins, arguments, optional):
    documents = manifests(stand_ins, *arguments, *optional, "--image=image")
    assert [d["kind"] for d in documents] == (
        ["JobSet"] if arguments is TPU else ["Service", "Job"]
    )
    for document in documents:
        check(document)
    if arguments is GPU:
        container = documents[1]["spec"]["template"]["spec"]["containers"][0]
        given = {"name": "XLA_CLIENT_MEM_FRACTION", "value": "0.92"}
        assert given in container["env"]
    text = yaml.safe_dump(documents)
    for value in (
        "robot",
        "mine",
        "kueue.x-k8s.io/queue-name: q",
        "gke-spot: 'true'",
        "namespace: ns",
    ):
        assert (value in text) == bool(optional), value


def test_unknown_fields_fail(stand_ins):
    (jobset,) = manifests(stand_ins, *TPU, "--image=image")
    jobset["spec"]["failurePolicy"]["maxRestart"] = 3
    with pytest.raises(ValidationError):
        check(jobset)
    (jobset,) = manifests(stand_ins, *TPU, "--image=image")
    jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["completion"] = 3
    with pytest.raises(kubernetes_validate.ValidationError):
        check(jobset)


def test_slices_hosts_and_chips(stand_ins):
    (jobset,) = manifests(stand_ins, *TPU, "--image=image", "--restarts=7", "--grace=99")
    (slices,) = jobset["spec"]["replicatedJobs"]
    job = slices["template"]["spec"]
    pod = job["template"]["spec"]
    assert (slices["replicas"], job["completions"], job["parallelism"]) == (2, 16, 16)
    assert pod["containers"][0]["resources"]["limits"] == {"google.com/tpu": 4}
    assert pod["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": "tpu-v5p-slice",
        "cloud.google.com/gke-tpu-topology": "4x4x4",
    }
    assert jobset["spec"]["failurePolicy"]["maxRestarts"] == 7
    assert pod["terminationGracePeriodSeconds"] == 99
    (one,) = manifests(stand_ins, *TPU[:1], "--topology=1x1", *TPU[3:], "--type=v6e", "--image=i")
    job = one["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert job["completions"] == 1
    assert job["template"]["spec"]["containers"][0]["resources"]["limits"] == {"google.com/tpu": 1}


@pytest.mark.parametrize("arguments", [TPU, GPU])
def test_restarts_only_after_42_and_signals(stand_ins, arguments):
    document = manifests(stand_ins, *arguments, "--image=image")[-1]
    spec = document["spec"]
    job = spec["replicatedJobs"][0]["template"]["spec"] if arguments is TPU else spec
    rule = job["podFailurePolicy"]["rules"][-1]
    codes = rule["onExitCodes"]
    assert (rule["action"], codes["operator"]) == ("FailJob", "NotIn")
    assert codes["values"] == sorted([42, *(128 + n for n in (6, 7, 8, 9, 11, 15)), 175])
    assert codes["containerName"] == job["template"]["spec"]["containers"][0]["name"]


@pytest.mark.parametrize("arguments", [TPU, GPU])
def test_arguments_reach_the_program_as_written(stand_ins, arguments):
    odd = "--config.data.tokenizer=$$(HOME) ${HOME} $$ - : # 'x' {y} 😀"
    document = manifests(stand_ins, *arguments, ODD, odd, "--image=image")[-1]
    spec = document["spec"]
    job = spec["replicatedJobs"][0]["template"]["spec"] if arguments is TPU else spec
    args = job["template"]["spec"]["containers"][0]["args"]
    assert [expanded(argument) for argument in args] == [
        *("train", "--config=configs/llama1b.py", "--workdir=gs://bucket/run", ODD, odd),
    ]
    assert not list(stand_ins.folder.rglob("pwned"))


def test_data_as_an_indexed_job(stand_ins):
    arguments = ("gke", "configs/tiny.py", "--output=gs://bucket/shards", "--parts=4", "--image=i")
    parts, finish = manifests(stand_ins, *arguments, ODD, script="prepare_data.sh")
    check(parts)
    check(finish)
    assert (parts["spec"]["completions"], finish["spec"]["completions"]) == (4, 1)
    (container,) = parts["spec"]["template"]["spec"]["containers"]
    (last,) = finish["spec"]["template"]["spec"]["containers"]
    assert container["args"].pop(1) == "--shard=$(PART)/4"
    assert container["args"] == last["args"]
    assert "PART" in [variable["name"] for variable in container["env"]]
    stand_ins.rules(DONE)
    assert stand_ins.run("prepare_data.sh", *arguments).returncode == 0
    assert [call[2] for call in stand_ins.calls("kubectl")] == ["apply", "get"] * 2


def test_placeholders_and_values_match():
    filled = render()
    with pytest.raises(ValueError, match="'B', 'C'"):
        filled("a: ${A}\nb: ${B}", {"A": "1", "C": "2"}, [])
    text = filled(
        "a: ${A}\nb: ${B}\nc: ${C}\n- ${ARGUMENTS}", {"A": "007", "B": "", "C": "7"}, ["x"]
    )
    assert text == 'a: "007"\nc: 7\n- "x"\n'


# ---------------------------------------------------------------- what is called


def verbs(stand_ins):
    """docker's and kubectl's verbs, in order."""
    return [call[1] if call[0] == "docker" else call[2] for call in stand_ins.calls()]


def test_builds_applies_and_follows(stand_ins):
    running = {"call": "get jobset/", "out": "", "times": 2}
    stand_ins.rules(running, DONE)
    ended = stand_ins.run("gke.sh", *TPU, "--build=repository")
    assert ended.returncode == 0, ended.stderr
    look = ["get", "get", "logs"]
    assert verbs(stand_ins) == ["build", "push", "apply", *look, *look, "get"]
    build, push = stand_ins.calls("docker")
    assert push[2] == build[3].removeprefix("--tag=")
    assert re.fullmatch(r"repository/t5x_diffeq-tpu:[0-9a-f]{12}", push[2])


@pytest.mark.parametrize(
    ("rule", "message", "last"),
    [
        ({"call": "docker build", "status": 1}, "the image can't be built", "build"),
        ({"call": "docker push", "status": 1}, "can't be pushed", "push"),
        ({"call": "apply", "status": 1}, "kubectl did not take the manifest", "apply"),
        ({"call": "get jobset/", "out": "Failed"}, "jobset/llama1b failed", "get"),
        ({"call": "get jobset/", "status": 1}, "the cluster can't be reached", "get"),
    ],
)
def test_failures_end_clearly(stand_ins, rule, message, last):
    stand_ins.rules(rule)
    ended = stand_ins.run("gke.sh", *TPU, "--build=repository")
    assert_one_error(ended, 1, message)
    assert verbs(stand_ins)[-1] == last
    assert len(verbs(stand_ins)) <= 8


def test_image_is_missing(stand_ins):
    stand_ins.rules({"call": "get pods", "out": "ImagePullBackOff ErrImagePull"})
    ended = stand_ins.run("gke.sh", *GPU, "--image=nowhere")
    assert_one_error(ended, 1, "can't start: ImagePullBackOff ErrImagePull (image nowhere)")
    assert verbs(stand_ins) == ["apply", *["get", "get"] * 5]


def test_the_cluster_is_out_of_reach_for_a_moment(stand_ins):
    stand_ins.rules({"call": "get job/", "status": 1, "times": 3}, DONE)
    assert stand_ins.run("gke.sh", *GPU, "--image=image").returncode == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (TPU, "give --image=IMAGE, or --build=REPOSITORY"),
        ((*TPU, "--image=i", "--build=r"), "--image and --build exclude each other"),
        ((*TPU, "--gpu=x", "--image=i"), "--topology (TPU) and --gpu exclude each other"),
        ((TPU[0], TPU[3], "--image=i"), "give --topology=4x4x4 for TPU slices"),
        ((TPU[0], TPU[3], "--topology=4xx", "--image=i"), "give --topology=4x4x4"),
        ((*TPU, "--chips-per-host=3", "--image=i"), "has 64 chips, which are not whole hosts"),
        ((*TPU, "--name=" + "x" * 41, "--image=i"), "at most 40"),
    ],
)
def test_bad_arguments(stand_ins, arguments, message):
    assert_one_error(stand_ins.run("gke.sh", *arguments), 2, message)
    assert stand_ins.calls() == []
