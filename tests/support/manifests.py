"""Manifests that launch/gke.sh and prepare_data.sh would apply, and the schemas that they fit."""

import json
import re

import kubernetes_validate
import yaml
from helpers import SUPPORT
from jsonschema import validate

KUBERNETES = "1.34"
JOBSET = json.loads((SUPPORT / "schemas" / "jobset.json").read_text())

CONFIG, WORKDIR = "configs/llama1b.py", "--workdir=gs://bucket/run"
TPU = (CONFIG, "--topology=4x4x4", "--slices=2", WORKDIR, "--unchecked")
GPU = (CONFIG, "--gpu=nvidia-h100-80gb", "--nodes=3", WORKDIR, "--unchecked")


def manifests(stand_ins, *arguments, script="gke.sh"):
    """What --dry-run prints, without the commands."""
    ended = stand_ins.run(script, *arguments, "--dry-run")
    assert ended.returncode == 0, ended.stderr
    assert stand_ins.calls() == []
    documents = re.split(r"^\+ .*\n|^---\n", ended.stdout, flags=re.MULTILINE)
    return [document for text in documents if (document := yaml.safe_load(text))]


def check(document, jobset=JOBSET):
    """Strictly: a field that the schema doesn't know fails."""
    if document["kind"] == "JobSet":
        validate(document, jobset)
        job = document["spec"]["replicatedJobs"][0]["template"]
        check({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, **job})
    else:
        kubernetes_validate.validate(document, KUBERNETES, strict=True)


def expand(argument):
    """A container's argument as Kubernetes passes it on, without variables of that name."""
    return re.sub(r"\$(\$|\(\w+\))", lambda m: "$" if m[1] == "$" else "WRONG", argument)


def pods_of(document):
    """The Job of a JobSet, its pods and their container."""
    job = document["spec"]["replicatedJobs"][0]["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    return job, job["template"]["spec"], container


def rules_of_pods(document):
    return pods_of(document)[0]["podFailurePolicy"]["rules"]


def what_follows(document, status, disrupted=False):
    """The action of JobSet when a pod ends with this status, or with None and its node is lost or
    refuses it; empty where its Job makes the pod again.

    Reasons, messages and the order of rules are those of Kubernetes' Job controller
    (pkg/controller/job/pod_failure_policy.go) and of JobSet (pkg/controllers/failure_policy.go).
    """
    reason = "BackoffLimitExceeded"
    message = "Job has reached the specified backoff limit"
    for index, rule in enumerate(rules_of_pods(document)):
        if codes := rule.get("onExitCodes"):
            said = f"Container train for pod default/pod failed with exit code {status}"
            holds = status and (status in codes["values"]) == (codes["operator"] == "In")
        else:
            said = "Pod default/pod has condition DisruptionTarget"
            condition = {"type": "DisruptionTarget", "status": "True"}
            holds = disrupted and condition in rule["onPodConditions"]
        if holds:
            reason, message = "PodFailurePolicy", f"{said} matching FailJob rule at index {index}"
            break
    else:
        if pods_of(document)[0]["backoffLimit"]:
            return ""
    for rule in document["spec"]["failurePolicy"]["rules"]:
        patterns = rule.get("onJobFailureMessagePatterns", [""])
        if reason in rule["onJobFailureReasons"] and any(re.search(p, message) for p in patterns):
            return rule["action"]
    return "RestartJobSet"
