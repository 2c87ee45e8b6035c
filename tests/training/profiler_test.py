"""Profiles: traces of exactly the steps that were asked for, read back; requests; failures."""

import re
import time
from collections import defaultdict
from contextlib import contextmanager
from unittest.mock import create_autospec

import jax
import jax.numpy as jnp
import pytest
from bucket_server import serve
from helpers import config_with_train, metrics_of, setup_of, training_of
from patience import patience

from t5x_diffeq.cli.train import train_to_end
from t5x_diffeq.config.config import Config
from t5x_diffeq.system import files
from t5x_diffeq.system.errors import InputError
from t5x_diffeq.training.checks import run_checks
from t5x_diffeq.training.hooks import profiler as profiler_module
from t5x_diffeq.training.hooks import requests
from t5x_diffeq.training.hooks.profiler import Profiler
from t5x_diffeq.training.setup import Setup
from t5x_diffeq.training.step import lower_train_step

SCOPES = ("make W(t)", "solver step", "attention", "mlp", "embed", "head", "loss", "optimizer")
BACKWARD = ("pull back to P", "gradient norm")


def read_traces(folder):
    """The traces below a folder, by the name under which XProf lists them."""
    found = folder.glob("plugins/profile/*/*.xplane.pb")
    return {path.parent.name: jax.profiler.ProfileData.from_file(str(path)) for path in found}


def events(trace):
    return [event for plane in trace.planes for line in plane.lines for event in line.events]


def steps_of(trace):
    """The numbers of the steps that are marked in a trace."""
    return sorted(dict(e.stats)["step_num"] for e in events(trace) if e.name == "train")


def runs_of(trace):
    """Operations of the train step by the run of its program that they belong to."""
    found = defaultdict(set)
    for event in events(trace):
        stats = dict(event.stats)
        if stats.get("hlo_module") == "jit_train_step" and not event.name.startswith("end: "):
            found[stats["run_id"]].add(stats["hlo_op"])
    return found


def names_of_operations(program):
    """What the program of a step calls its operations, by instruction."""
    lines = re.findall(r'%([\w.\-]+) = .*metadata=\{op_name="([^"]*)"', program)
    return dict(lines)


@pytest.fixture(scope="module")
def traced(finished, tmp_path_factory):
    """The config and workdir of a run that traced its steps 3 to 4."""
    config = finished[0].copy_and_resolve_references()
    config.train.profile = "3:4"
    workdir = tmp_path_factory.mktemp("traced")
    assert train_to_end(Config.of(config), workdir) == 0
    return config, workdir


@pytest.mark.slow
@pytest.mark.in_turns("trainings")
def test_the_trace_holds_exactly_the_steps(traced):
    _, workdir = traced
    (trace,) = read_traces(workdir / "profiles").values()
    assert steps_of(trace) == [3, 4]
    runs = runs_of(trace)
    assert len(runs) == 2
    assert len(set(map(frozenset, runs.values()))) == 1  # each of them whole
    assert list((workdir / "profiles").glob("plugins/profile/steps_3-4/*.trace.json.gz"))


@pytest.mark.slow
def test_its_operations_have_the_names_of_the_mathematics(traced):
    config, workdir = traced
    (trace,) = read_traces(workdir / "profiles").values()
    setup = setup_of(config)
    with setup.context():
        names = names_of_operations(
            lower_train_step(setup, config.train.batch_size).compile().as_text()
        )
    ran = [names.get(operation, "") for run in runs_of(trace).values() for operation in run]
    parts = {name: re.split(r"[/()]", name.replace("make W(t)", "make W[t]")) for name in ran}

    def shown(scope, name):
        return scope.replace("make W(t)", "make W[t]") in parts[name]

    for scope in (*SCOPES, *BACKWARD):
        # The head of this model is a table as it is: all that remains of it is its gradient.
        assert scope == "head" or any(shown(scope, name) for name in ran), scope
    for scope in ("make W(t)", "solver step", "attention", "mlp", "embed", "loss"):
        assert any(shown(scope, name) and "transpose(" in name for name in ran), scope
    (file,) = (workdir / "profiles").glob("plugins/profile/*/*.xplane.pb")
    assert all(scope.encode() in file.read_bytes() for scope in BACKWARD)  # XProf finds them there


@pytest.mark.slow
def test_tracing_changes_nothing(traced, finished):
    assert metrics_of(traced[1]) == metrics_of(finished[1])


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"profile": "5:3"}, r"train.profile=5:3: .*such as 100:105"),
        ({"profile": "3:7"}, "at most train.total_steps=6"),
        ({"profile": "3"}, "train.profile is '3'; it can be FIRST:LAST"),
        ({"profile_processes": (0, 2)}, "names process 2, and there are 1: .* from 0 to 0"),
    ],
    ids=str,
)
def test_steps_and_processes_that_are_not_there_are_refused(keys, message):
    with pytest.raises(InputError, match=message):
        config = config_with_train(total_steps=6, **keys)
        run_checks("train", config)
        Profiler.check(config, create_autospec(Setup, instance=True))


def profiler_of(workdir, **keys):
    config = config_with_train(**keys)
    return Profiler(training_of(create_autospec(Setup, instance=True, config=config), workdir))


@contextmanager
def looking(tmp_path, monkeypatch, **keys):
    """A profiler that looks for requests all the time, and a loop of steps to call."""
    monkeypatch.setattr(requests, "SECONDS_BETWEEN_LOOKS", 0.02)
    x = jnp.ones(8)
    double = jax.jit(lambda x: 2 * x)
    profiler = profiler_of(tmp_path, total_steps=99, **keys)
    with profiler, requests.Requests(profiler.training):

        def step(n):
            profiler.before_batch(n, x)
            y = double(x)
            profiler.after_step(n, y, {})

        yield profiler, step


def wait_until(condition):
    limit = time.monotonic() + patience(20)
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.01)


@pytest.mark.parametrize(("content", "last"), [("", 5), ("2\n", 2), ("3:4", 4)])
def test_a_file_asks_for_steps(tmp_path, monkeypatch, content, last):
    with looking(tmp_path, monkeypatch) as (profiler, step):
        (tmp_path / "profile").write_text(content)
        wait_until(lambda: profiler.planned)
        wait_until(lambda: not (tmp_path / "profile").exists())
        for n in range(1, 8):
            step(n)
    ((run, trace),) = read_traces(tmp_path / "profiles").items()
    first = 3 if ":" in content else 1
    assert run == f"steps_{first}-{last}"
    assert steps_of(trace) == list(range(first, last + 1))


def test_a_failure_is_a_warning(tmp_path, monkeypatch, capsys):
    def fail(*_, **__):
        raise RuntimeError("no profiler here")

    monkeypatch.setattr(profiler_module, "start_trace", fail)
    with looking(tmp_path, monkeypatch, profile="1:2") as (_, step):
        (tmp_path / "profile").write_text("many")
        wait_until(lambda: not (tmp_path / "profile").exists())
        step(1)
        step(2)
    said = capsys.readouterr().err
    assert "warning: no profile: no profiler here" in said
    assert "holds 'many'; write a number of steps from 1 to 1000" in said


def test_a_run_that_ends_early_stores_what_it_has(tmp_path, monkeypatch, capsys):
    with looking(tmp_path, monkeypatch, profile="2:50") as (_, step):
        for n in (1, 2, 3):
            step(n)
    assert steps_of(read_traces(tmp_path / "profiles")["steps_2-3"]) == [2, 3]
    assert "tensorboard --logdir=" in capsys.readouterr().err
    with looking(tmp_path, monkeypatch, profile="2:3") as (_, step):
        step(7)  # of a run resumed at step 6
    assert "steps 2-3 were done before they could be traced" in capsys.readouterr().err


def test_a_bucket_gets_the_trace(tmp_path, monkeypatch):
    with serve() as (_, environment):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        workdir = files.parse_path("gs://bucket/run", "workdir")
        with looking(workdir, monkeypatch) as (profiler, step):
            files.write_whole(workdir / "profile", b"2")
            wait_until(lambda: profiler.planned)
            for n in (1, 2, 3):
                step(n)
        names = [path.name for path in files.files_in(workdir / "profiles")]
    assert sum(name.endswith(".xplane.pb") for name in names) == 1
