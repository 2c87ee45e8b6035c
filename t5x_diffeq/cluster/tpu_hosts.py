"""The number of a TPU host among the hosts of its run, from GKE's variables or Cloud TPU metadata.

JAX finds it too, but only on TPU machines. Since it is read here, a run can name the hosts that did
not arrive, and the same variables start a run anywhere. Hosts are numbered across all slices:
the first slice's hosts, then the second's.

    GKE        TPU_WORKER_HOSTNAMES, TPU_WORKER_ID, and with several slices MEGASCALE_NUM_SLICES,
               MEGASCALE_SLICE_ID, MEGASCALE_COORDINATOR_ADDRESS
    Cloud TPU  the metadata server: worker-network-endpoints, agent-worker-number, and tpu-env,
               which holds the MEGASCALE_ values; TPU_SKIP_MDS_QUERY=1 skips it
"""

import glob
import importlib.util
import re
import time
import urllib.error
import urllib.request
from collections.abc import Mapping

from t5x_diffeq.system.errors import InputError, RunError

_PORT = "8482"  # JAX's port on TPU; libtpu itself uses 8471 to 8476
_TRIES = 6  # to reach the metadata server, which may start later than this process


def host_rank(environment: Mapping[str, str]) -> tuple[str, int, int] | None:
    """(process 0's host:port, count, own number); None on one host alone or without a TPU.

    Raises:
      InputError: if the variables contradict each other.
      RunError: if this is a Cloud TPU whose metadata can't be read.
    """
    if _is_on_gke(environment):
        variables = dict(environment)
    elif _is_on_cloud_tpu(environment):
        variables = _read_metadata(environment.get("GCE_METADATA_IP", "metadata.google.internal"))
    else:
        return None
    hosts = (variables.get("TPU_PROCESS_ADDRESSES") or variables["TPU_WORKER_HOSTNAMES"]).split(",")
    slices = _parse_number(variables, "MEGASCALE_NUM_SLICES", "1")
    if len(hosts) * slices == 1:
        return None
    index = _parse_number(variables, "TPU_WORKER_ID", None)
    index += _parse_number(variables, "MEGASCALE_SLICE_ID", "0") * len(hosts)
    if index >= len(hosts) * slices:
        raise InputError(
            f"TPU_WORKER_ID={variables['TPU_WORKER_ID']} is too large: the environment names "
            f"{slices} slice(s) of {len(hosts)} host(s)"
        )
    first = (variables.get("MEGASCALE_COORDINATOR_ADDRESS") or hosts[0]).split(":")[0]
    port = environment.get("JAX_COORDINATOR_PORT") or _PORT
    return f"{first}:{port}", len(hosts) * slices, index


def lists_hosts(environment: Mapping[str, str]) -> bool:
    """Whether GKE or a metadata server lists hosts."""
    return _is_on_gke(environment) or _is_on_cloud_tpu(environment)


def _is_on_gke(environment: Mapping[str, str]) -> bool:
    return "TPU_WORKER_HOSTNAMES" in environment or "TPU_PROCESS_ADDRESSES" in environment


def _is_on_cloud_tpu(environment: Mapping[str, str]) -> bool:
    """Whether to ask the metadata server: if the environment names it, or there are TPU chips."""
    if environment.get("GCE_METADATA_IP"):
        return True
    chips = glob.glob("/dev/accel*") or glob.glob("/dev/vfio/[0-9]*")
    wanted = not environment.get("JAX_PLATFORMS", "").startswith("cpu")
    wanted = wanted and not environment.get("TPU_SKIP_MDS_QUERY")  # JAX sets it without chips
    return bool(chips and wanted and importlib.util.find_spec("libtpu"))


def _parse_number(variables: Mapping[str, str], name: str, default: str | None) -> int:
    value = variables.get(name) or default
    if value is None or not value.isdecimal():
        raise InputError(
            f"the environment names a TPU's hosts, but {name}={value!r} is not a number"
        )
    return int(value)


def _read_metadata(server: str) -> dict[str, str]:
    # An endpoint is a host's name or address, or the older name:number:address.
    endpoints = _read_attribute(server, "worker-network-endpoints").split(",")
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
    problem: OSError | None = None
    for _ in range(_TRIES):
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                return answer.read().decode()
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return ""
            problem = error
        except OSError as error:
            problem = error
        time.sleep(0.5)
    raise RunError(
        f"this is a TPU host, and its metadata {name} can't be read: {problem}; set "
        "TPU_SKIP_MDS_QUERY=1 to run on this host alone, or JAX_COORDINATOR_ADDRESS, "
        "JAX_NUM_PROCESSES and JAX_PROCESS_ID"
    )
