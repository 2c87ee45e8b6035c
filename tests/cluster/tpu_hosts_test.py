"""A TPU host's rank, from GKE's variables and from the metadata that Cloud TPU serves."""

import pytest
from http_server import Handler, serving
from tpu_metadata import serving_metadata

from t5x_diffeq.cluster import tpu_hosts
from t5x_diffeq.cluster.processes import rank_in
from t5x_diffeq.system import retries
from t5x_diffeq.system.errors import InfrastructureError, InputError, RunError

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
        ({"TPU_WORKER_ID": "x"}, "^TPU_WORKER_ID=x: Google sets it"),
        ({"TPU_WORKER_ID": ""}, "^TPU_WORKER_ID=None and "),
        ({"TPU_WORKER_ID": "3"}, r"^TPU_WORKER_ID=3 and .* 2 slice\(s\) of 3 host"),
        ({"MEGASCALE_SLICE_ID": "2"}, "MEGASCALE_SLICE_ID=2 must name one of 2 slice"),
        ({"MEGASCALE_NUM_SLICES": "two"}, "^MEGASCALE_NUM_SLICES=two: "),
        ({"TPU_WORKER_HOSTNAMES": "a,,b"}, "^TPU_WORKER_HOSTNAMES=a,,b: "),
        ({"JAX_COORDINATOR_PORT": "99999"}, "^JAX_COORDINATOR_PORT=99999: "),
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


@pytest.mark.parametrize(
    ("status", "raised", "tries"), [(None, InfrastructureError, 3), (403, RunError, 1)]
)
def test_metadata_that_cannot_be_read(monkeypatch, capsys, status, raised, tries):
    monkeypatch.setattr(retries, "PAUSES", (0, 0))
    asked = []
    with serving(Refuses, status=status, asked=asked) as there:
        address = there if status else "127.0.0.1:1"
        with pytest.raises(raised, match=r"worker-network-endpoints can't be read: .*; set TPU_S"):
            tpu_hosts.host_rank({"GCE_METADATA_IP": address})
    assert capsys.readouterr().err.count("trying again") == tries - 1
    assert len(asked) == (tries if status else 0)


def test_metadata_that_answers_later(monkeypatch):
    monkeypatch.setattr(retries, "PAUSES", (0, 0))
    monkeypatch.setattr(Refuses, "then", "10.0.0.1", raising=False)
    with serving(Refuses, status=503, asked=[]) as address:
        assert tpu_hosts.host_rank({"GCE_METADATA_IP": address}) is None


class Refuses(Handler):
    """Answers the first two requests with a status, and later ones with `then` if there is one."""

    status: int
    asked: list[str]
    then: str | None = None

    def respond(self):
        self.asked.append(self.path)
        served = self.then if len(self.asked) > 2 else None
        return self.answer((served or "").encode(), 200 if served else self.status)
