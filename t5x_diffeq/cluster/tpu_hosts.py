"""The number of a TPU host among the hosts of its run, from GKE's variables or Cloud TPU metadata.

JAX finds the number too, but only on TPU machines. Because it is read here, a run can name the
hosts that did not arrive, and the same variables start a run anywhere. Hosts are numbered across
all slices, the first slice's hosts before the second's.

    GKE        TPU_WORKER_HOSTNAMES, TPU_WORKER_ID, and with several slices MEGASCALE_NUM_SLICES,
               MEGASCALE_SLICE_ID, MEGASCALE_COORDINATOR_ADDRESS
    Cloud TPU  the metadata server: worker-network-endpoints, agent-worker-number, and tpu-env,
               which holds the MEGASCALE_ values; TPU_SKIP_MDS_QUERY=1 skips it
"""

import glob
import importlib.util
import re
import urllib.error
import urllib.request
from collections.abc import Mapping

from t5x_diffeq.system import environment
from t5x_diffeq.system.errors import InputError, failure_kind
from t5x_diffeq.system.retries import retry

_PORT = 8482  # JAX's port on TPU; libtpu itself uses 8471 to 8476


def host_rank(variables: Mapping[str, str]) -> tuple[str, int, int] | None:
    """(process 0's host:port, count, own number); None on one host alone or without a TPU.

    Raises:
      InputError: if the variables contradict each other.
      InfrastructureError: if this is a Cloud TPU whose metadata server does not answer.
      RunError: if the metadata server refuses.
    """
    if _is_on_gke(variables):
        facts = variables
    elif _is_on_cloud_tpu(variables):
        facts = _read_metadata(variables.get("GCE_METADATA_IP", "metadata.google.internal"))
    else:
        return None
    hosts = next(filter(None, (each.read(facts) for each in environment.TPU_HOSTS)), None)
    slices = environment.NUM_SLICES.read(facts) or 1
    if hosts is None or len(hosts) * slices == 1:
        return None
    host, own_slice = environment.TPU_WORKER_ID.read(facts), environment.SLICE_ID.read(facts) or 0
    if host is None or host >= len(hosts) or own_slice >= slices:
        raise InputError(
            f"TPU_WORKER_ID={host} and MEGASCALE_SLICE_ID={own_slice} must name one of {slices} "
            f"slice(s) of {len(hosts)} host(s), which the environment lists: {', '.join(hosts)}"
        )
    first, _ = environment.SLICE_COORDINATOR.read(facts) or (hosts[0], None)
    port = environment.COORDINATOR_PORT.read(variables) or _PORT
    return f"{first}:{port}", len(hosts) * slices, own_slice * len(hosts) + host


def lists_hosts(variables: Mapping[str, str]) -> bool:
    """Whether GKE or a metadata server lists hosts."""
    return _is_on_gke(variables) or _is_on_cloud_tpu(variables)


def _is_on_gke(variables: Mapping[str, str]) -> bool:
    return any(each.name in variables for each in environment.TPU_HOSTS)


def _is_on_cloud_tpu(variables: Mapping[str, str]) -> bool:
    """Whether to ask the metadata server: if the environment names it, or there are TPU chips."""
    if variables.get("GCE_METADATA_IP"):
        return True
    chips = glob.glob("/dev/accel*") or glob.glob("/dev/vfio/[0-9]*")
    wanted = not variables.get("JAX_PLATFORMS", "").startswith("cpu")
    wanted = wanted and not variables.get("TPU_SKIP_MDS_QUERY")  # JAX sets it without chips
    return bool(chips and wanted and importlib.util.find_spec("libtpu"))


def _read_metadata(server: str) -> dict[str, str]:
    # An endpoint is a host's name or address, or the older name:number:address.
    endpoints = environment.split_words(_read_attribute(server, "worker-network-endpoints"))
    values = dict(
        re.findall(r"^(\w+)\s*:\s*'?(.*?)'?\s*$", _read_attribute(server, "tpu-env"), re.MULTILINE)
    )
    several = {name: value for name, value in values.items() if name.startswith("MEGASCALE_")}
    return {
        **several,
        "TPU_WORKER_HOSTNAMES": ",".join(endpoint.split(":")[-1] for endpoint in endpoints),
        "TPU_WORKER_ID": _read_attribute(server, "agent-worker-number").strip(),
    }


def _read_attribute(server: str, name: str) -> str:
    address = f"http://{server}/computeMetadata/v1/instance/attributes/{name}"
    request = urllib.request.Request(address, headers={"Metadata-Flavor": "Google"})

    def read() -> str:
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                return answer.read().decode()
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return ""
            raise

    what = f"this is a TPU host, and its metadata {name} can't be read"
    try:
        return retry(read, what)  # the server may start later than this process
    except Exception as error:  # of urllib, http or the system
        raise failure_kind(error)(
            f"{what}: {error}; set TPU_SKIP_MDS_QUERY=1 to run on this host alone, or "
            "JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID"
        ) from error
