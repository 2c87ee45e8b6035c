"""Every verb's bad arguments end in one line and exit status 2; help in 0."""

import argparse
import asyncio
import importlib
import os
import re
import sys
import tomllib
from types import SimpleNamespace

import pytest
from absl import flags
from helpers import ROOT, run_to_end

import t5x_diffeq as td
from t5x_diffeq.cli import VERBS, command_line, failures, flag_values, quiet_libraries, verb_flags
from t5x_diffeq.cluster import processes
from t5x_diffeq.system import environment
from t5x_diffeq.system.errors import InputError


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch):
    """Nothing tells of other processes, as a test that plans for TPUs would have it."""
    for name in list(os.environ):
        if name.startswith(("GCE_", "JAX_COORDINATOR", "OMPI_", "SLURM_", "TPU_WORKER", "WORLD_")):
            monkeypatch.delenv(name)


def run(*arguments):
    return run_to_end([sys.executable, "-m", *arguments])


@pytest.fixture
def end_of(monkeypatch, capsys):
    """Runs a verb that does something; its exit status, and what it has said to the user."""

    def end_of(verb, **how):
        monkeypatch.setattr(sys, "argv", ["verb"])
        with pytest.raises(SystemExit) as ended:
            command_line.run(verb, "", flags.FlagValues(), **how)
        return ended.value.code, capsys.readouterr().err

    return end_of


ANSWERED_WITHOUT = ["jax", "flax", "orbax", "grain", "sentencepiece", "tensorboardX", "numpy"]
ANSWERS = """
import runpy, sys
for verb, cases in {cases}.items():
    for arguments, status in cases:
        sys.argv = ["verb", *arguments]
        try:
            runpy.run_module("t5x_diffeq." + verb, run_name="__main__")
        except SystemExit as ended:
            assert ended.code == status, (verb, arguments, ended.code)
        else:
            raise AssertionError((verb, arguments))
    print("imported by " + verb + ":", *(set({heavy}) & sys.modules.keys()))
"""


def test_help_and_mistakes_are_answered_before_jax_is_imported():
    """By every verb, in one process."""
    cases, messages = {}, []
    for verb in VERBS:
        cases[verb] = [(["--help"], 0), (["--version"], 0), (["--nope=1"], 2)]
        messages.append("--nope is not a flag of this verb")
        if verb in ("train", "finetune", "prepare_data", "benchmark", "plan", "convert", "sweep"):
            cases[verb] += [
                (["--help=keys"], 0),
                *(
                    (["--config=configs/tiny.py", f"--config.{key}"], 2)
                    for key in ("model.widht=3", "seed=-3")
                ),
            ]
            messages += ["'model.widht' does not exist; did you mean model.e", "seed is -3; it m"]
    program = ANSWERS.format(cases=cases, heavy=ANSWERED_WITHOUT)
    ended = run_to_end([sys.executable, "-c", program])
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("  --workdir ") >= len(VERBS) - 5
    for verb in VERBS:
        assert f"imported by {verb}:\n" in ended.stdout
    said = ended.stderr.splitlines()
    assert len(said) == len(messages)
    assert all(message in line for message, line in zip(messages, said, strict=True))


@pytest.mark.parametrize(
    "environment",
    [
        {"JAX_COORDINATOR_ADDRESS": "host:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "0"},
        {"SLURM_STEP_NUM_TASKS": "2"},
        {"TPU_WORKER_HOSTNAMES": "a,b"},
        {"GCE_METADATA_IP": "127.0.0.1"},
        {"JAX_NUM_PROCESSES": "2"},
        {"WORLD_SIZE": "2"},
    ],
)
def test_whoever_may_have_others_joins_them_before_the_flags_are_read(environment, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    joined = []
    monkeypatch.setattr(processes, "initialise", lambda: joined.append(True))
    monkeypatch.setattr(sys, "argv", ["verb", "--nope=1"])
    for several in (True, False):
        with pytest.raises(SystemExit):
            command_line.run(lambda: None, "", flags.FlagValues(), several=several)
        assert len(joined) == 1


def test_a_process_alone_joins_none(monkeypatch, end_of):
    monkeypatch.setattr(processes, "initialise", lambda: pytest.fail("joined"))
    assert end_of(lambda: 7, several=True) == (7, "")


def leave(error):
    """What user code does: a hook, a plug-in, a block, a config file, a source of data."""
    raise error


EXITS = (SystemExit(0), SystemExit(), SystemExit("text"), GeneratorExit(), asyncio.CancelledError())


@pytest.mark.parametrize("error", EXITS, ids=repr)
def test_only_the_end_of_a_verb_ends_it_with_0(error, end_of):
    error.add_note("in the hook early at step 18")
    status, said = end_of(lambda: leave(error))
    (line,) = said.splitlines()
    text = f"raised {type(error).__name__}({error}): code that"
    assert status == 1 and line.startswith(f"error: {__file__}, line ") and text in line
    assert line.endswith("what is wrong; in the hook early at step 18")


class UntoldError(Exception):
    def __str__(self):
        raise SystemExit(0)


def test_an_error_whose_text_ends_the_process_is_a_failure(end_of):
    status, said = end_of(lambda: leave(UntoldError()))
    assert status == 1 and said.endswith("error: UntoldError, whose text can't be had\n")


def test_the_line_of_an_exit_names_the_code_and_not_the_library(end_of):
    parse = argparse.ArgumentParser().parse_args
    status, said = end_of(lambda: parse(["--help"]))
    assert status == 1 and f"error: {__file__}, line " in said


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("T5X_DIFFEQ_ARRIVAL_SECONDS", "5min"),
        ("T5X_DIFFEQ_SILENCE_SECONDS", "nan"),
        ("T5X_DIFFEQ_LEASE_SECONDS", "-1"),
        ("T5X_DIFFEQ_CACHE_GIB", "many"),
        ("T5X_DIFFEQ_KEEP_MEMORY", "no"),
        ("T5X_DIFFEQ_PARENT", "x"),
        ("T5X_DIFFEQ_SPARSE_CORE", "off"),
        ("T5X_DIFFEQ_COMBINE_MIB", "64MB"),
        ("XLA_CLIENT_MEM_FRACTION", "92"),
        ("T5X_DIFFEQ_CACHE", "gs://bucket/cache"),
        ("XLA_FLAGS", "xla_cpu_enable_fast_math=true"),
        ("XLA_FLAGS", "--xla_force_host_platform_device_count=two"),
        ("JAX_NUM_CPU_DEVICES", "0"),
    ],
)
def test_variables_of_this_package(name, value, monkeypatch, end_of):
    monkeypatch.setenv(name, value)
    status, said = end_of(lambda: None)
    (line,) = said.splitlines()
    assert status == 2 and re.match(f"error: {name}={value}: .*(give|unset)", line)


def test_a_variable_that_nothing_reads_is_told(monkeypatch, end_of):
    monkeypatch.setenv("T5X_DIFFEQ_CACHE_DIR", "/cache")
    status, said = end_of(lambda: None)
    (line,) = said.splitlines()
    assert line.startswith("warning: nothing reads T5X_DIFFEQ_CACHE_DIR; did you mean T5X_DIFFEQ_C")
    assert status == 0 and "T5X_DIFFEQ_CACHE?" in line.replace(" or ", "? ")


@pytest.mark.parametrize(
    ("error", "named"),
    [
        (PermissionError(13, "Permission denied", "/run/state"), "/run/state: Permission denied; "),
        (
            RuntimeError("Unknown backend: 'gpu' requested, but no platforms"),
            "JAX_PLATFORM_NAME=gpu: Unknown backend: 'gpu' requested, but no platforms; unset it",
        ),
    ],
    ids=lambda each: type(each).__name__,
)
def test_what_this_machine_refuses_is_one_line(error, named, monkeypatch, end_of):
    monkeypatch.setenv("JAX_PLATFORM_NAME", "gpu")
    status, said = end_of(lambda: leave(error))
    (line,) = said.splitlines()
    assert status == 2 and line.startswith(f"error: {named}")


@pytest.mark.parametrize(
    ("words", "variables", "status", "said"),
    [
        ("train --flagfile=none.txt", {}, 2, "error: --flagfile: [Errno 2] No such file"),
        ("train --help=train.total_steps", {"PYTHONIOENCODING": "ascii"}, 0, ""),
        ("status --workdir=ä", {"PYTHONIOENCODING": "ascii"}, 2, "holds a run"),
    ],
)
def test_a_flag_file_and_an_output_of_ascii(words, variables, status, said, tmp_path):
    command = [sys.executable, "-m", "t5x_diffeq", *words.split()]
    ended = run_to_end(command, cwd=tmp_path, env={**os.environ, **variables})
    assert ended.returncode == status and said in ended.stderr and "Traceback" not in ended.stderr


def test_jax_has_one_name_for_the_fraction_of_a_gpus_memory(monkeypatch):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")
    new, old = (x for x in environment.OF_EVERY_VERB if x.name.endswith("MEM_FRACTION"))
    assert (new.read(), old.read()) == (None, 0.9)
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "0.9")
    with pytest.raises(InputError, match="only in XLA_CLIENT_MEM_FRACTION"):
        old.read()


@pytest.mark.parametrize("text", ["6,12,24", "6 12 24", "6\n12\n24\n", "6, 12,\n24"])
def test_a_list_is_split_at_commas_and_white_space(text):
    own = verb_flags.VerbFlags("verb")
    steps = own.define_words("steps", "")
    own(["verb", f"--steps={text}"])
    assert steps.value == ["6", "12", "24"]


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_has_a_module_to_run(verb):
    """`python -m t5x_diffeq.VERB` runs it; importing it fails, and names what to import."""
    with pytest.raises(ImportError, match=f"import t5x_diffeq.cli.{verb} instead"):
        importlib.import_module(f"t5x_diffeq.{verb}")
    assert td.train is importlib.import_module("t5x_diffeq.cli.train").train


def test_the_command_runs_verbs(tmp_path):
    """What `pip` makes of [project.scripts] finds plug-ins in this folder, as `python -m` does."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, _, function = project["scripts"]["t5x_diffeq"].partition(":")
    script = tmp_path / "t5x_diffeq"
    script.write_text(f"import sys\nfrom {module} import {function}\nsys.exit({function}())\n")

    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "mine.py").write_text("raise SystemExit('found')\n")

    def run_script(*words):
        ended = run_to_end(
            [sys.executable, script, *words],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            cwd=tmp_path / "here",
        )
        return ended.returncode, ended.stdout, ended.stderr

    assert run_script("status", "--help") == (0, run("t5x_diffeq.status", "--help").stdout, "")
    assert run_script("trian")[::2] == (2, "error: there is no verb 'trian'; did you mean train?\n")
    plugin = ("--config=configs/tiny.py", "--config.model.block=mine:Block", "--workdir=run")
    status, said, told = run_script("train", *plugin)
    assert (status, said, told.count("\n")) == (1, "", 1)
    assert f"{tmp_path}/here/mine.py, line 1, raised SystemExit(found): code that" in told


def test_a_verbs_file_is_no_script():
    script = ROOT / "t5x_diffeq" / "cli" / "status.py"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = run_to_end([sys.executable, script], env=environment)
    told = "error: this file is no script; run python -m t5x_diffeq.status\n"
    assert (ended.returncode, ended.stdout, ended.stderr) == (2, "", told)


def test_a_verb_is_no_file():
    ended = run("t5x_diffeq.status.py", "--help")
    told = "error: t5x_diffeq.status is a verb, and no package; write python -m t5x_diffeq.status\n"
    assert (ended.returncode, ended.stdout, ended.stderr) == (2, "", told)


def test_of_a_save_that_failed_one_line_is_shown(monkeypatch):
    """TensorStore's threads find a closed event loop, as often as there are files left."""
    shown = []
    monkeypatch.setattr(sys, "__unraisablehook__", shown.append)
    for text in ("Event loop is closed", "of the program"):
        error = SimpleNamespace(exc_value=RuntimeError(text))
        quiet_libraries._show_unless_loop_closed(error)
    assert shown == [error]


def test_notes_of_libraries_are_left_out():
    error = InputError("data.path is wrong")
    error.add_note("in the hook eval at step 3")
    error.add_note("For simplicity, JAX has removed its internal frames from the traceback.")
    assert (
        failures._with_notes(str(error), error) == "data.path is wrong; in the hook eval at step 3"
    )


def test_an_exit_waits_for_python_but_not_for_the_threads_of_arrow():
    """pause() stands for Arrow's destructor, which waits for ever for a thread that reads."""
    program = """if True:
        import atexit, ctypes, sys, threading, time
        from t5x_diffeq.cli import run_verb, status
        def main():
            sys.modules["pyarrow.dataset"] = sys  # as after a stream was read
            c = ctypes.CDLL(None)
            c.__cxa_atexit(c.pause, None, None)
            atexit.register(print, "exit functions have run")
            threading.Thread(target=lambda: print(time.sleep(0.2) or "a thread has ended")).start()
            return 42
        status.main = main
        run_verb("status")"""
    done = run_to_end([sys.executable, "-c", program])
    assert done.returncode == 42, done.stderr
    assert done.stdout.splitlines() == ["a thread has ended", "exit functions have run"]


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--processes=0", "--processes=0 must be at least 1"),
        ("--restarts=x", "argument --restarts: invalid int value: 'x'"),
    ],
)
def test_several_processes_of_this_machine(argument, message):
    script = ROOT / "launch" / "local_processes.py"
    command = [sys.executable, script, argument, "--", "true"]
    ended = run_to_end(command)
    assert (ended.returncode, ended.stderr) == (2, f"error: {message}\n")


def test_local_sh_tells_a_mistake_before_it_installs_anything(tmp_path):
    local, fresh = ROOT / "launch" / "local.sh", tmp_path / "venv"
    ended = run_to_end([local, "configs/tinny.py"], env={**os.environ, "VENV": str(fresh)})
    (line,) = ended.stderr.splitlines()
    assert line.startswith("error: configs/tinny.py: there is no such file; the project has conf")
    assert ended.returncode == 2 and " configs/tiny.py" in line and not fresh.exists()
    command, here = [local, "configs/tiny.py", "--dry-run"], {**os.environ, "VENV": sys.prefix}
    ended = run_to_end([*command, "--config.model.widht=3"], env=here)
    assert "did you mean model.embed_dim?" in ended.stderr
    assert (ended.returncode, ended.stdout) == (2, "")
    ended = run_to_end([*command, "--config.model.embed_dim=8", f"--workdir={tmp_path}"], env=here)
    assert (ended.returncode, ended.stdout.count("+ ")) == (0, 3)


@pytest.mark.parametrize(
    ("command", "status", "said"),
    [
        (
            ["sh", "launch/local.sh", "--dry-run", "--config=configs/tiny.py:smooth"],
            0,
            "tiny-smoot",
        ),
        (["launch/local.sh", "configs/tiny.py", "\u2014dry-run"], 2, "dash; write --dry-run"),
        (["launch/local.sh", "https://a.b/tiny.py"], 2, "is an address; download the file"),
        (["sh", "launch/reproduce/spectra.sh", "--help"], 0, "do spectra grow with depth?"),
    ],
)
def test_a_launcher_is_started_in_another_way(command, status, said, tmp_path):
    """By another shell, with the config as a flag, or with what a browser or a chat has changed."""
    ended = run_to_end(command, env={**os.environ, "VENV": str(tmp_path / "venv")})
    assert ended.returncode == status and said in ended.stderr + ended.stdout, ended.stderr


@pytest.mark.parametrize(
    ("value", "parts"),
    [
        (None, (0, 1)),
        ("3/64", (3, 64)),
        *((wrong, None) for wrong in ("3", "2/2", "a/b", "-1/2", "٣/4")),
    ],
)
def test_parts(value, parts):
    own = flags.FlagValues()
    flag = flags.DEFINE_string("part", value, "", flag_values=own)
    own(["verb"])
    if parts:
        assert flag_values.parse_part(flag) == parts
    else:
        with pytest.raises(InputError, match=f"--part={value} is not i/n with i from 0 to n - 1"):
            flag_values.parse_part(flag)
