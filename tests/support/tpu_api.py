"""A server of the parts of Google's REST APIs that `gcloud` asks for in launch/tpu_pod.sh.

It knows Cloud TPU (v2 and v2alpha1), one project of Compute Engine, and secrets. Paths and fields
are those of the reference pages (cloud.google.com/tpu/docs/reference/rest). The states of a queued
resource and errors are scripted; requests are recorded.
"""

import base64
import json
import re
import threading
from pathlib import Path
from typing import NamedTuple
from urllib.parse import parse_qsl, unquote, urlsplit

from http_server import Handler, serving

PROJECT, ZONE = "a-project", "us-east5-a"
PLACE = f"projects/{PROJECT}/locations/{ZONE}"
ERRORS = {  # what Google says: the name of the status, and a message
    400: ("FAILED_PRECONDITION", "The queued resource holds nodes; delete it with force."),
    403: ("PERMISSION_DENIED", "Permission denied on '{}' (or it may not exist)."),
    404: ("NOT_FOUND", "Resource '{}' was not found"),
    429: ("RESOURCE_EXHAUSTED", "Quota exceeded for quota metric 'API requests'."),
    503: ("UNAVAILABLE", "The service is currently unavailable."),
}
ROUTES = {  # a method of TpuApi for each method and path
    r"POST .*/queuedResources": "create",
    r"GET .*/queuedResources/(.*)": "describe",
    r"DELETE .*/queuedResources/(.*)": "delete",
    r"GET .*/nodes/(.*)": "node",
    r"PATCH .*/nodes/(.*)": "update",
    r"POST .*/nodes/(.*):getGuestAttributes": "guest_attributes",
    r"GET .*/operations/(.*)": "operation",
    r"GET /compute/v1/projects/(.*)": "project",
    r"GET /v1/projects/.*/secrets/(.*)/versions/latest:access": "secret",
}


class Request(NamedTuple):
    """What was asked for."""

    method: str
    path: str
    query: dict[str, str]
    body: dict

    def resource(self) -> str:
        """The name of what it is about, as the APIs write it."""
        return re.sub(r"^/v\w+/|:\w+$", "", self.path)


class ApiError(Exception):
    """An answer with an error's status: its number, and what it is about."""


class TpuApi:
    """Use as a context. Nodes have hosts at `addresses`; their keys are written to a file.

    `states` are those of a queued resource after its creation: each question for it is answered
    with the next, and the last is kept. A number is the status of an error instead.
    """

    def __init__(self, addresses: list[str], authorized_keys: Path, secrets: dict[str, str]):
        self.addresses, self.authorized_keys, self.secrets = addresses, authorized_keys, secrets
        self.states: list[str | int] = ["WAITING_FOR_RESOURCES", "PROVISIONING", "ACTIVE"]
        self.requests: list[Request] = []
        self.resources: dict[str, dict] = {}
        self.coming: dict[str, list[str | int]] = {}  # the next states of each
        self.nodes: dict[str, dict] = {}
        self.failures: list[tuple[str, int]] = []
        self.lock = threading.Lock()

    def __enter__(self) -> "TpuApi":
        self.server = serving(Answers, api=self)
        self.address = f"http://{self.server.__enter__()}/"
        return self

    def __exit__(self, *exception: object) -> None:
        self.server.__exit__(None, None, None)

    def fail(self, pattern: str, status: int, times: int) -> None:
        """The next requests whose method and path match are answered with this error."""
        self.failures += [(pattern, status)] * times

    def take_away(self, name: str) -> None:
        """Google preempts the TPU."""
        with self.lock:
            self.resources[name]["state"], self.coming[name] = {"state": "SUSPENDED"}, []
            for node in self.nodes.values():
                node["state"] = "PREEMPTED"

    def asked(self, pattern: str) -> list[Request]:
        """The requests whose method and path match."""
        return [each for each in self.requests if re.search(pattern, f"{each.method} {each.path}")]

    def answer(self, request: Request) -> dict:
        """The body of the answer.

        Raises:
          ApiError: if it is an error.
        """
        words = f"{request.method} {request.path}"
        self.requests.append(request)
        for failure in self.failures:
            if re.search(failure[0], words):
                self.failures.remove(failure)
                raise ApiError(failure[1], request.resource())
        if (place := re.search("locations/[^/]+", words)) and place[0] not in PLACE:
            raise ApiError(403, place[0])
        for pattern, method in ROUTES.items():
            if found := re.fullmatch(pattern, words):
                return getattr(self, method)(request, *found.groups())
        raise ApiError(404, request.path)

    # ------------------------------------------------------------------------ queued resources

    def create(self, request: Request) -> dict:
        name = request.query["queuedResourceId"]
        self.add(name, request.body)
        return begun(f"create-{name}")

    def add(self, name: str, body: dict) -> None:
        """A queued resource that was created so."""
        self.resources[name] = {"name": f"{PLACE}/queuedResources/{name}", **body}
        self.coming[name] = list(self.states)

    def describe(self, request: Request, name: str) -> dict:
        resource = known(self.resources, name, request)
        if self.coming[name]:
            coming = self.coming[name].pop(0)
            if coming == 404:
                del self.resources[name]
                self.nodes.clear()
            if isinstance(coming, int):
                raise ApiError(coming, request.resource())
            resource["state"] = {"state": coming}
        if resource["state"]["state"] == "FAILED":
            message = {"code": 8, "message": "There is no more capacity."}
            resource["state"]["failedData"] = {"error": message}
        if resource["state"]["state"] == "ACTIVE":
            for spec in resource["tpu"]["nodeSpec"]:
                self.nodes.setdefault(spec["nodeId"], self.new_node(spec))
        return resource

    def delete(self, request: Request, name: str) -> dict:
        resource = known(self.resources, name, request)
        if request.query.get("force") != "True" and resource["state"]["state"] == "ACTIVE":
            raise ApiError(400, "")
        self.coming[name] = ["DELETING", 404]
        return begun(f"delete-{name}")

    # ----------------------------------------------------------------------------------- nodes

    def new_node(self, spec: dict) -> dict:
        endpoints = [
            {"ipAddress": f"10.0.0.{number}", "accessConfig": {"externalIp": address}}
            for number, address in enumerate(self.addresses)
        ]
        fixed = {"id": "1", "apiVersion": "V2", "state": "READY", "health": "HEALTHY"}
        name = f"{PLACE}/nodes/{spec['nodeId']}"
        return {**spec["node"], **fixed, "name": name, "networkEndpoints": endpoints}

    def node(self, request: Request, name: str) -> dict:
        return known(self.nodes, name, request)

    def update(self, request: Request, name: str) -> dict:
        """The metadata is changed; the hosts take the SSH keys in it, USER:KEY in each line."""
        self.nodes[name]["metadata"] = request.body["metadata"]
        keys = request.body["metadata"]["ssh-keys"].split("\n")
        self.authorized_keys.write_text("".join(f"{key.partition(':')[2]}\n" for key in keys))
        return begun(f"update-{name}")

    def guest_attributes(self, request: Request, name: str) -> dict:
        workers = [each for each in request.body["workerIds"] if each] or self.addresses
        items = [{"namespace": "hostkeys", "key": "ssh-ed25519", "value": f"AAAA{name}"}]
        one = {"queryPath": "hostkeys/", "queryValue": {"items": items}}
        return {"guestAttributes": [one] * len(workers)}

    # ---------------------------------------------------------------------------- and the rest

    def operation(self, request: Request, name: str) -> dict:
        version, node = request.path.split("/")[1], self.nodes.get(name.partition("-")[2], {})
        kind = {"@type": f"type.googleapis.com/google.cloud.tpu.{version}.Node"}
        return {**begun(name), "done": True, "response": {**kind, **node}}

    def project(self, request: Request, name: str) -> dict:
        return {"name": name, "commonInstanceMetadata": {"items": []}}

    def secret(self, request: Request, name: str) -> dict:
        data = base64.b64encode(self.secrets[name].encode()).decode()
        return {"name": request.path, "payload": {"data": data}}


def begun(name: str) -> dict:
    """An operation."""
    return {"name": f"{PLACE}/operations/{name}", "done": False}


def known(kind: dict[str, dict], name: str, request: Request) -> dict:
    if name not in kind:
        raise ApiError(404, request.resource())
    return kind[name]


class Answers(Handler):
    """Turns HTTP into calls of the API."""

    api: TpuApi

    def respond(self) -> None:
        url, body = urlsplit(self.path), json.loads(self.body or b"{}")
        request = Request(self.command, unquote(url.path), dict(parse_qsl(url.query)), body)
        with self.api.lock:
            try:
                self.answer(self.api.answer(request))
            except ApiError as refusal:
                status, what = refusal.args
                name, message = ERRORS[status]
                told = {"code": status, "message": message.format(what), "status": name}
                self.answer({"error": told}, status)
