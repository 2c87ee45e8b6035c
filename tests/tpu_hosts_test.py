"""A TPU host's rank, from GKE's variables and from the metadata that Cloud TPU serves."""

import pytest
from tpu_metadata import serving_metadata

from t5x_diffeq.cluster import tpu_hosts
from t5x_diffeq.cluster.processes import rank_in
from t5x_diffeq.system.errors import InputError, RunError

SLICE = {"TPU_WORKER_HOSTNAMES": "a,b,c", "TPU_WORKER_ID": "2"}
SLICES = {
    **SLICE,
    "MEGASCALE_NUM_SLICES": "2",
    "MEGASCALE_SLICE_ID": "1",
    "MEGASCALE_COORDINATOR_ADDRESS": "first:8080",
}


def test_on_gke():
    assert tpu_hosts.host_rank({}) is None
    assert tpu_hosts.host_rank({**SLICE, "TPU_WORKER_HOSTNAMES": "localhost"}) is None
    assert tpu_hosts.host_rank(SLICE) == ("a:8482", 3, 2)
    assert tpu_hosts.host_rank(SLICES) == ("first:8482", 6, 5)
    assert tpu_hosts.host_rank({**SLICE, "JAX_COORDINATOR_PORT": "99"}) == ("a:99", 3, 2)
    addresses = {**SLICE, "TPU_PROCESS_ADDRESSES": "x:8471,y:8471,z:8471"}
    assert tpu_hosts.host_rank(addresses) == ("x:8482", 3, 2)


def test_an_address_alone_leaves_the_rest_to_the_tpu():
    assert rank_in({**SLICE, "JAX_COORDINATOR_ADDRESS": "a"}) is None


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"TPU_WORKER_ID": "x"}, "TPU_WORKER_ID='x' is not a number"),
        ({"TPU_WORKER_ID": "3"}, "TPU_WORKER_ID=3 is too large"),
        ({"MEGASCALE_NUM_SLICES": "two"}, "MEGASCALE_NUM_SLICES='two'"),
    ],
)
def test_contradictions(wrong, message):
    with pytest.raises(InputError, match=message):
        tpu_hosts.host_rank({**SLICES, **wrong})


@pytest.mark.parametrize("endpoints", ["10.0.0.1,10.0.0.2", "n:0:10.0.0.1,n:1:10.0.0.2"])
def test_on_cloud_tpu(endpoints):
    with serving_metadata(1, endpoints) as address:
        assert tpu_hosts.host_rank({"GCE_METADATA_IP": address}) == ("10.0.0.1:8482", 2, 1)
    several = "MEGASCALE_NUM_SLICES: '2'\nMEGASCALE_SLICE_ID: '1'\n"
    several += "MEGASCALE_COORDINATOR_ADDRESS: '10.9.9.9:8080'\n"
    with serving_metadata(0, endpoints, several) as address:
        assert tpu_hosts.host_rank({"GCE_METADATA_IP": address}) == ("10.9.9.9:8482", 4, 2)


def test_one_host_runs_alone():
    with serving_metadata(0, "10.0.0.1") as address:
        assert tpu_hosts.host_rank({"GCE_METADATA_IP": address}) is None


def test_metadata_does_not_answer(monkeypatch):
    monkeypatch.setattr(tpu_hosts.time, "sleep", lambda seconds: None)
    with pytest.raises(RunError, match="worker-network-endpoints can't be read"):
        tpu_hosts.host_rank({"GCE_METADATA_IP": "127.0.0.1:1"})
