"""A failure of the infrastructure that comes again at the same step ends the restarts."""

import json

import pytest

from t5x_diffeq.cluster import recurrence
from t5x_diffeq.cluster.peers import Failure

LOST = "process 3 of 4 has not answered for 60 s; the same command continues the run"


@pytest.fixture(autouse=True)
def end():
    yield
    recurrence.end()


def attempt(workdir, start, step, message):
    """The failure of an attempt that took steps to `step`."""
    recurrence.watch(workdir, start, recurrence.take_last_failure(workdir))
    recurrence.at_step(step)
    return Failure(0, 175, message).unless_repeated()


def test_the_same_at_the_same_step_is_final(tmp_path):
    assert attempt(tmp_path, 2, 5, LOST).status == 175
    again = attempt(tmp_path, 4, 5, LOST.replace("3 of", "1 of").replace("60 s", "61 s"))
    assert again.status == 1
    assert again.message == (
        "process 1 of 4 has not answered for 61 s; the attempt before failed alike at the same "
        "step, so a restart is in vain"
    )


@pytest.mark.parametrize(("step", "message"), [(6, LOST), (5, "Connection reset by peer")])
def test_another_step_or_another_failure_is_not(tmp_path, step, message):
    assert attempt(tmp_path, 2, 5, LOST).status == 175
    assert attempt(tmp_path, 2, step, message).status == 175


def test_an_attempt_that_went_on_forgets_it(tmp_path):
    """It was stopped and saved, or is done."""
    assert attempt(tmp_path, 2, 5, LOST).status == 175
    recurrence.watch(tmp_path, 2, recurrence.take_last_failure(tmp_path))
    recurrence.end()
    assert attempt(tmp_path, 2, 5, LOST).status == 175


GONE = "FAILED_PRECONDITION: No visible GPU devices. (set JAX_PLATFORMS='')"


@pytest.mark.parametrize(("message", "second"), [(GONE, 1), ("Connection refused", 175)])
def test_of_failures_before_the_state_that_of_a_missing_gpu_is_compared(tmp_path, message, second):
    for status in (175, second):
        recurrence.begin(tmp_path / "new")
        assert Failure(0, 175, message).unless_repeated().status == status


def test_what_it_leaves(tmp_path):
    attempt(tmp_path, 2, 5, LOST)
    left = json.loads((tmp_path / recurrence.FILE).read_text())
    assert left["step"] == 5 and left["message"] == LOST
    (tmp_path / recurrence.FILE).write_text("[")
    assert recurrence.take_last_failure(tmp_path) == {}
    assert not (tmp_path / recurrence.FILE).exists()
