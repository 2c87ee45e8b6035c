"""A server of the parts of Google's REST APIs that `gcloud` asks for in launch/tpu_pod.sh.

It knows Cloud TPU (v2 and v2alpha1: queued resources, nodes, operations), one project of Compute
Engine, and secrets. Paths and fields are those of the reference pages
(cloud.google.com/tpu/docs/reference/rest). The states of a queued resource and errors are scripted;
requests are recorded.
"""

import base64
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple
from urllib.parse import parse_qsl, unquote, urlsplit

PROJECT, ZONE = "a-project", "us-east5-a"
ERRORS = {  # what Google says: the name of the status, and a message
    400: ("FAILED_PRECONDITION", "The queued resource holds nodes; delete it with force."),
    403: ("PERMISSION_DENIED", "Permission denied on '{what}' (or it may not exist)."),
    404: ("NOT_FOUND", "Resource '{what}' was not found"),
    409: ("ALREADY_EXISTS", "Resource '{what}' already exists"),
    429: ("RESOURCE_EXHAUSTED", "Quota exceeded for quota metric 'API requests'."),
    503: ("UNAVAILABLE", "The service is currently unavailable."),
}
PLACE = r"/(?P<version>v2|v2alpha1)/(?P<place>projects/[^/]+/locations/(?P<zone>[^/]+))"
ROUTES = {  # a method of TpuApi for each method and path
    rf"POST {PLACE}/queuedResources": "create",
    rf"GET {PLACE}/queuedResources/(?P<name>[^/]+)": "describe",
    rf"DELETE {PLACE}/queuedResources/(?P<name>[^/]+)": "delete",
    rf"GET {PLACE}/nodes/(?P<name>[^/]+)": "node",
    rf"PATCH {PLACE}/nodes/(?P<name>[^/]+)": "update",
    rf"POST {PLACE}/nodes/(?P<name>[^/]+):getGuestAttributes": "guest_attributes",
    rf"GET {PLACE}/operations/(?P<name>[^/]+)": "operation",
    r"GET /compute/v1/projects/(?P<name>[^/]+)": "project",
    r"GET /v1/projects/[^/]+/secrets/(?P<name>[^/]+)/versions/latest:access": "secret",
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
        self.failures: list[list] = []  # pattern, status and number of times
        self.lock = threading.RLock()

    def __enter__(self) -> "TpuApi":
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), type("", (Handler,), {"api": self}))
        self.address = f"http://127.0.0.1:{self.server.server_port}/"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.server.shutdown()
        self.server.server_close()

    def fail(self, pattern: str, status: int, times: int) -> None:
        """The next requests whose method and path match are answered with this error."""
        self.failures.append([pattern, status, times])

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
            if failure[2] and re.search(failure[0], words):
                failure[2] -= 1
                raise ApiError(failure[1], request.resource())
        for pattern, method in ROUTES.items():
            if found := re.fullmatch(pattern, words):
                named = found.groupdict()
                if named.get("zone", ZONE) != ZONE:
                    raise ApiError(403, f"locations/{named['zone']}")
                return getattr(self, method)(request, named)
        raise ApiError(404, request.path)

    # ------------------------------------------------------------------------ queued resources

    def create(self, request: Request, named: dict[str, str]) -> dict:
        name = request.query["queuedResourceId"]
        if name in self.resources:
            raise ApiError(409, f"{named['place']}/queuedResources/{name}")
        self.add(name, request.body)
        return self.begun(named, f"create-{name}")

    def add(self, name: str, body: dict) -> None:
        """A queued resource that was created so."""
        path = f"projects/{PROJECT}/locations/{ZONE}/queuedResources/{name}"
        self.resources[name] = {"name": path, **body}
        self.coming[name] = list(self.states)

    def describe(self, request: Request, named: dict[str, str]) -> dict:
        resource, name = self.known(self.resources, request, named), named["name"]
        if self.coming[name]:
            coming = self.coming[name].pop(0)
            if isinstance(coming, int):
                if coming == 404:
                    self.forget(name)
                raise ApiError(coming, request.resource())
            resource["state"] = {"state": coming}
        state = resource["state"]
        if state["state"] == "FAILED":
            state["failedData"] = {"error": {"code": 8, "message": "There is no more capacity."}}
        if state["state"] == "ACTIVE":
            for spec in resource["tpu"]["nodeSpec"]:
                self.nodes.setdefault(spec["nodeId"], self.new_node(spec))
        return resource

    def delete(self, request: Request, named: dict[str, str]) -> dict:
        resource = self.known(self.resources, request, named)
        if request.query.get("force") != "True" and resource["state"]["state"] == "ACTIVE":
            raise ApiError(400, "")
        self.coming[named["name"]] = ["DELETING", 404]
        return self.begun(named, f"delete-{named['name']}")

    def forget(self, name: str) -> None:
        """The queued resource and its nodes are gone."""
        for spec in self.resources.pop(name)["tpu"]["nodeSpec"]:
            self.nodes.pop(spec["nodeId"], None)

    # ----------------------------------------------------------------------------------- nodes

    def new_node(self, spec: dict) -> dict:
        endpoints = [
            {"ipAddress": f"10.0.0.{number}", "accessConfig": {"externalIp": address}}
            for number, address in enumerate(self.addresses)
        ]
        path = f"projects/{PROJECT}/locations/{ZONE}/nodes/{spec['nodeId']}"
        fixed = {"id": "1", "apiVersion": "V2", "state": "READY", "health": "HEALTHY"}
        return {**spec["node"], **fixed, "name": path, "networkEndpoints": endpoints}

    def node(self, request: Request, named: dict[str, str]) -> dict:
        return self.known(self.nodes, request, named)

    def update(self, request: Request, named: dict[str, str]) -> dict:
        """The metadata is changed; the hosts take the SSH keys in it, USER:KEY in each line."""
        self.node(request, named)["metadata"] = request.body["metadata"]
        keys = request.body["metadata"]["ssh-keys"].split("\n")
        lines = "".join(f"{key.partition(':')[2]}\n" for key in keys)
        self.authorized_keys.write_text(lines)
        return self.begun(named, f"update-{named['name']}")

    def guest_attributes(self, request: Request, named: dict[str, str]) -> dict:
        self.node(request, named)
        workers = [each for each in request.body["workerIds"] if each]
        workers = workers or list(map(str, range(len(self.addresses))))
        items = [{"namespace": "hostkeys", "key": "ssh-ed25519", "value": f"AAAA{named['name']}"}]
        one = {"queryPath": "hostkeys/", "queryValue": {"items": items}}
        return {"guestAttributes": [one] * len(workers)}

    # ---------------------------------------------------------------------------- and the rest

    def known(self, kind: dict[str, dict], request: Request, named: dict[str, str]) -> dict:
        if named["name"] not in kind:
            raise ApiError(404, request.resource())
        return kind[named["name"]]

    def begun(self, named: dict[str, str], name: str) -> dict:
        return {"name": f"{named['place']}/operations/{name}", "done": False}

    def operation(self, request: Request, named: dict[str, str]) -> dict:
        node = self.nodes.get(named["name"].partition("-")[2], {})
        kind = {"@type": f"type.googleapis.com/google.cloud.tpu.{named['version']}.Node"}
        return {**self.begun(named, named["name"]), "done": True, "response": {**kind, **node}}

    def project(self, request: Request, named: dict[str, str]) -> dict:
        return {"name": named["name"], "commonInstanceMetadata": {"items": []}}

    def secret(self, request: Request, named: dict[str, str]) -> dict:
        if named["name"] not in self.secrets:
            raise ApiError(403, f"secrets/{named['name']}")
        data = base64.b64encode(self.secrets[named["name"]].encode()).decode()
        return {"name": request.path, "payload": {"data": data}}


class Handler(BaseHTTPRequestHandler):
    """Turns HTTP into calls of the API."""

    protocol_version = "HTTP/1.1"
    api: TpuApi

    def handle_request(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(length) or b"{}")
        url = urlsplit(self.path)
        request = Request(self.command, unquote(url.path), dict(parse_qsl(url.query)), body)
        with self.api.lock:
            try:
                status, answer = 200, self.api.answer(request)
            except ApiError as refusal:
                status, what = refusal.args
                name, message = ERRORS[status]
                told = {"code": status, "message": message.format(what=what), "status": name}
                answer = {"error": told}
            text = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json; charset=UTF-8")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    do_GET = do_POST = do_PATCH = do_DELETE = handle_request  # noqa: N815

    def log_message(self, *arguments: object) -> None:
        pass
