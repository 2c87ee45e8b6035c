"""launch/tpu_pod.sh from the request for a TPU to the end of the run, with a stand-in for gcloud.

The stand-in does what it is told to, or fails. Its texts are those of the real one
(`gcloud_answers.py`), which `gcloud_test.py` runs. A queued resource is WAITING_FOR_RESOURCES,
PROVISIONING, ACTIVE, FAILED, SUSPENDING or SUSPENDED, and in the last state "no longer eligible for
further allocation" (docs.cloud.google.com/tpu/docs/queued-resources).
"""

import re

import pytest
from gcloud_answers import (
    ABSENT,
    ACTIVE,
    BOOT,
    DENIED,
    EXHAUSTED,
    PLACE,
    RUN,
    STATUS,
    UNAVAILABLE,
    UNREACHABLE,
    ends,
    states,
)
from stand_ins import assert_one_error


def steps(stand_ins):
    """The calls to gcloud in short: describe, create, scp, and the host's commands."""
    short = []
    for call in stand_ins.calls("gcloud"):
        words = " ".join(call)
        host = re.search(r"tpu_host\.sh (\w+)", words)
        verb = call[call.index("tpus") + 2]
        short.append(host.group(1) if host else verb)
    return short


BEGIN = ["scp", "install", "start", "follow", "status"]


def test_makes_the_tpu_and_runs(stand_ins):
    stand_ins.rules(*states("", "", "WAITING_FOR_RESOURCES", "PROVISIONING"), *ends("ended 0"))
    ended = stand_ins.run("tpu_pod.sh", *RUN, "--spot")
    assert ended.returncode == 0, ended.stderr
    waiting = ["describe"] * 2 + ["create"] + ["describe"] * 3
    assert steps(stand_ins) == [*waiting, *BEGIN]
    (create,) = (call for call in stand_ins.calls() if "create" in call)
    assert create[5:] == [
        "llama1b-ode",
        "--zone=z",
        "--node-id=llama1b-ode",
        "--accelerator-type=v5p-32",
        "--runtime-version=v2-alpha-tpuv5",
        "--async",
        BOOT,
        "--spot",
    ]
    workers = [word for call in stand_ins.calls() for word in call if "--worker" in word]
    assert workers == ["--worker=all"] * 3 + ["--worker=0"] * 2


def test_slices(stand_ins):
    stand_ins.rules(*states("", ""), *ends("ended 0"))
    assert stand_ins.run("tpu_pod.sh", *RUN, "--slices=2", "--name=two").returncode == 0
    assert steps(stand_ins)[-8:] == ["scp"] * 2 + ["install"] * 2 + ["start"] * 2 + BEGIN[3:]
    named = [call[6] for call in stand_ins.calls("gcloud") if "ssh" in call]
    assert named == ["two-0", "two-1", "two-0", "two-1", "two-0", "two-0"]
    (create,) = (call for call in stand_ins.calls() if "create" in call)
    assert {"--node-count=2", "--node-prefix=two"} <= set(create)


def test_preempted(stand_ins):
    """Saved, TPU taken away: it is requested again, and the run goes on there."""
    taken = states("ACTIVE", "ACTIVE", "SUSPENDING", "SUSPENDED", "DELETING", "")
    stand_ins.rules(*taken, *ends("absent", "ended 42", "ended 0"))
    ended = stand_ins.run("tpu_pod.sh", *RUN)
    assert ended.returncode == 0, ended.stderr
    first = ["describe", "status", "describe", *BEGIN]
    again = ["describe"] * 2 + ["delete"] + ["describe"] * 2 + ["create", "describe", *BEGIN]
    assert steps(stand_ins) == first + again
    assert "ended 42: starting again (1 of at most 100)" in ended.stderr


def test_restarts_are_bounded(stand_ins):
    stand_ins.rules(*states(""), {"call": STATUS, "out": "ended 42\n"})
    ended = stand_ins.run("tpu_pod.sh", *RUN, "--restarts=2")
    assert_one_error(ended, 1, "started again 2 times (--restarts) and ended 42")
    assert steps(stand_ins).count("start") == 3


def test_quota_exceeded(stand_ins):
    stand_ins.rules(EXHAUSTED, ABSENT)
    ended = stand_ins.run("tpu_pod.sh", *RUN)
    assert_one_error(ended, 1, "can't be requested; the lines above say why")
    assert "RESOURCE_EXHAUSTED" in ended.stderr
    assert steps(stand_ins) == ["describe", "describe", "create"]


def test_refused(stand_ins):
    stand_ins.rules(*states("", "", "FAILED"))
    ended = stand_ins.run("tpu_pod.sh", *RUN)
    assert_one_error(ended, 1, "was refused")


def test_gcloud_without_rights(stand_ins):
    stand_ins.rules(DENIED)
    ended = stand_ins.run("tpu_pod.sh", *RUN)
    assert_one_error(ended, 1, "gcloud can't tell the state of the TPU llama1b-ode")
    assert "create" not in steps(stand_ins)


def test_a_question_that_fails_does_not_end_the_wait(stand_ins):
    """The TPU would be granted later, and paid for, with nobody to use it."""
    waiting = states("", "", "WAITING_FOR_RESOURCES")
    stand_ins.rules(*waiting[:3], {**UNAVAILABLE, "times": 1}, *waiting[2:], *ends("ended 0"))
    ended = stand_ins.run("tpu_pod.sh", *RUN)
    assert ended.returncode == 0, ended.stderr
    assert "TPU llama1b-ode: unknown" in ended.stderr and UNAVAILABLE["error"] in ended.stderr
    assert steps(stand_ins).count("create") == 1


def test_the_zone_is_that_of_gcloud(stand_ins):
    """A reserved TPU can't be created without; and what is printed names all that it needs."""
    words = ("configs/llama1b.py:ode", *PLACE[:2], "--unchecked", "--reserved", "--slices=2")
    assert_one_error(stand_ins.run("tpu_pod.sh", *words), 2, "give --zone=us-east5-a")
    zone = {"call": "config get compute/zone", "out": "z-configured\n"}
    stand_ins.rules(zone, *states("", ""), *ends("ended 0"))
    ended = stand_ins.run("tpu_pod.sh", *words, "--project=p")
    assert ended.returncode == 0, ended.stderr
    (create,) = (call for call in stand_ins.calls() if "create" in call)
    assert "--zone=z-configured" in create
    place = "--name=llama1b-ode --project=p --zone=z-configured --slices=2"
    assert f"tpu_pod.sh delete {place}" in ended.stderr


@pytest.mark.parametrize("step", ["scp", "install", "start"])
def test_one_worker_is_not_reachable(stand_ins, step):
    call = " scp " if step == "scp" else rf"tpu_host\.sh {step}"
    stand_ins.rules({"call": call, **UNREACHABLE}, *states(""))
    ended = stand_ins.run("tpu_pod.sh", *RUN)
    assert_one_error(ended, 1, "every host of llama1b-ode")
    assert steps(stand_ins).count(step) == 3
    assert "follow" not in steps(stand_ins)


def test_ssh_dropped(stand_ins):
    """The run goes on without it, so its log is shown again, and nothing is started."""
    drop = {"call": r"tpu_host\.sh follow", **UNREACHABLE, "times": 1}
    stand_ins.rules(drop, *states(""), *ends("running", "ended 0"))
    ended = stand_ins.run("tpu_pod.sh", *RUN)
    assert ended.returncode == 0, ended.stderr
    assert steps(stand_ins) == ["describe"] * 2 + BEGIN + ["follow", "status"]


def test_ssh_drops_for_ever(stand_ins):
    drop = {"call": r"tpu_host\.sh (follow|status)", **UNREACHABLE}
    stand_ins.rules(drop, *states(""))
    ended = stand_ins.run("tpu_pod.sh", *RUN)
    assert_one_error(ended, 1, "worker 0 of llama1b-ode can't be held")
    assert steps(stand_ins).count("start") == 1


@pytest.mark.parametrize("status", [1, 2, 130])
def test_a_failed_run_is_not_started_again(stand_ins, status):
    report = {"call": r"tpu_host\.sh report", "out": "host: ended 1 | error: it broke\n"}
    stand_ins.rules(report, *states(""), *ends(f"ended {status}"))
    ended = stand_ins.run("tpu_pod.sh", *RUN)
    assert ended.returncode == 1
    assert f"the run ended with status {status}" in ended.stderr
    assert "error: it broke" in ended.stderr
    assert steps(stand_ins).count("start") == 1


def test_stopped_by_the_other_command(stand_ins):
    stand_ins.rules(*states(""), *ends("stopped 42"))
    assert stand_ins.run("tpu_pod.sh", *RUN).returncode == 0
    assert steps(stand_ins).count("start") == 1


def test_the_same_command_shows_the_run_that_is_there(stand_ins):
    stand_ins.rules(ACTIVE, *ends("running", "ended 0"))
    assert stand_ins.run("tpu_pod.sh", *RUN).returncode == 0
    assert steps(stand_ins) == ["describe", "status", "follow", "status"]


@pytest.mark.parametrize(
    ("arguments", "steps_wanted"),
    [
        (["status"], ["describe", "report"]),
        (["logs", "--worker=3"], ["follow"]),
        (["stop"], ["stop"]),
        (["delete"], ["delete"]),
    ],
)
def test_other_verbs(stand_ins, arguments, steps_wanted):
    stand_ins.rules(ACTIVE)
    ended = stand_ins.run("tpu_pod.sh", *arguments, TPU_NAME="named", TPU_ZONE="z", TPU_PROJECT="p")
    assert ended.returncode == 0, ended.stderr
    assert steps(stand_ins) == steps_wanted
    for call in stand_ins.calls():
        assert {"named", "--zone=z", "--project=p"} <= set(call)
