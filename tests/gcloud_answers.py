"""What gcloud answers to launch/tpu_pod.sh, as rules of `stand_in.py`.

Texts and statuses were recorded from gcloud 528 with the APIs of `tpu_api.py`.
"""

from helpers import ROOT

PLACE = ("--type=v5p-32", "--workdir=gs://bucket/run", "--zone=z")
RUN = ("configs/llama1b.py:ode", *PLACE, "--unchecked")
BOOT = f"--metadata-from-file=startup-script={ROOT}/launch/tpu_boot.sh"
STATUS = r"tpu_host\.sh status"
ACTIVE = {"call": "resources describe", "out": "ACTIVE\n"}


def _refusal(verb: str, error: str) -> dict:
    """An answer with an error to `queued-resources VERB`."""
    error = f"ERROR: (gcloud.compute.tpus.queued-resources.{verb}) {error}\n"
    return {"call": f"resources {verb}", "status": 1, "error": error}


ABSENT = _refusal(
    "describe",
    "NOT_FOUND: Resource 'projects/p/locations/z/queuedResources/llama1b-ode' was not found",
)
DENIED = _refusal(
    "describe", "PERMISSION_DENIED: Permission denied on 'locations/z' (or it may not exist)."
)
UNAVAILABLE = _refusal(  # after six tries
    "describe",
    "HttpError accessing <https://tpu.googleapis.com/v2/projects/p/locations/z/queuedResources/"
    "llama1b-ode?alt=json>: response: <{'content-type': 'application/json; charset=UTF-8', "
    '\'status\': 503}>, content <{"error": {"code": 503, "message": "The service is currently '
    'unavailable.", "status": "UNAVAILABLE"}}>\n'
    "This may be due to network connectivity issues. Please check your network settings, and the "
    "status of the service you are trying to reach.",
)
EXHAUSTED = _refusal(
    "create", "RESOURCE_EXHAUSTED: Quota exceeded for quota metric 'API requests'."
)
UNREACHABLE = {  # after ten tries to reach one of several hosts, and without a last line
    "status": 255,
    "error": "ssh: connect to host 203.0.113.11 port 22: Connection refused\n"
    "Failed to execute command on multiple workers. This may have happened if you have not added "
    'your SSH key to your ssh-agent using "ssh-add ~/.ssh/google_compute_engine".\n'
    "Retrying: SSH command error: [/usr/bin/ssh] exited with return code [255].\n",
}


def states(*names: str) -> list[dict]:
    """One after the other, then ACTIVE; none where the name is empty."""
    once = [
        {**ACTIVE, "out": f"{name}\n", "times": 1} if name else {**ABSENT, "times": 1}
        for name in names
    ]
    return [*once, ACTIVE]


def ends(*statuses: str) -> list[dict]:
    """What the host's status says, one after the other."""
    return [{"call": STATUS, "out": f"{status}\n", "times": 1} for status in statuses]
