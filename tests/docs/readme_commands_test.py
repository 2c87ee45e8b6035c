"""The commands of READMEs and of the site: all are understood, and marked ones run."""

import importlib
import os
import re
import shlex
import sys

import pytest
import warm_python
from compilation import flags_of_processes
from helpers import PAGES, ROOT, parse, run_to_end
from process_runs import SMALL_MODEL, write_text

MARK = "<!-- tested -->\n\n"
FENCE = re.compile(r"^ *```bash\n(.*?)^ *```$", re.M | re.S)
OTHER_FENCE = re.compile(r"^ *```.*?^ *```$", re.M | re.S)
INDENTED = re.compile(r"(?:^    .*\n?)+", re.M)
SCRIPT = re.compile(r"launch/(\w+\.sh)(?: (.*))?")
CHECKED = ("gke.sh", "gpu_nodes.sh", "gpu_slurm.sh", "tpu_pod.sh")  # with --unchecked they don't
DRY = (*CHECKED, "local.sh", "prepare_data.sh")
PYTHON = re.compile(r"(?:\.venv/bin/)?python -m t5x_diffeq\.(\w+) (.*)")
SMALL = (*SMALL_MODEL, "--config.train.batch_size=8")
BYTES = ("--config.data.tokenizer=bytes",)
SHORT_RUN = (
    *("--config.train.total_steps=4", "--config.train.eval_batches=2"),
    *("--config.train.eval_batch_size=8", "--config.train.log_every=1"),
    "--config.train.eval_all_at_end=False",
)
SETTINGS = {  # that make a command small
    "prepare_data": BYTES,
    "train": (*SMALL, *SHORT_RUN, *BYTES),
    "finetune": ("--config.train.batch_size=8", *SHORT_RUN),
    "evaluate": ("--eval_batches=2",),
    "benchmark": (*SMALL, *BYTES, "--rounds=2"),
}


def commands(text):
    """The lines of indented blocks and bash fences, those that go on joined, without comments."""
    blocks = FENCE.findall(text) + INDENTED.findall(OTHER_FENCE.sub("", text))
    lines = re.sub(r"\\\n\s*", "", "\n".join(blocks)).splitlines()
    return [line.strip().partition("  #")[0].strip() for line in lines]


def marked(text):
    """The blocks that follow the mark."""
    for rest in text.split(MARK)[1:]:
        fence = FENCE.match(rest)
        yield fence[0] if fence else rest.partition("\n\n")[0]


def of_verbs(lines):
    """The verb and the arguments of each line that runs one; of alternatives the first."""
    for line in lines:
        if found := PYTHON.fullmatch(line):
            verb, rest = found.groups()
            plain = re.sub(r"[][]", "", re.sub(r"\|\S+", "", rest))
            yield verb, shlex.split(plain)


def of_scripts(lines):
    """The name and the arguments of each line that runs a script of launch/."""
    for line in lines:
        if found := SCRIPT.fullmatch(line):
            yield found[1], shlex.split(re.sub(r"\[.*\]", "", found[2] or ""))


def cases(find):
    return [
        pytest.param(name, arguments, id=f"{path.relative_to(ROOT)}-{name}-{number}")
        for path in PAGES
        for number, (name, arguments) in enumerate(find(commands(path.read_text())))
    ]


ALL = cases(of_verbs)
SCRIPTS = cases(of_scripts)


def test_commands_are_found():
    assert len(ALL) > 20 and len(SCRIPTS) > 10


@pytest.mark.parametrize(("verb", "arguments"), ALL)
def test_commands_are_understood(verb, arguments, monkeypatch):
    """Flags and config keys exist, and take these values."""
    module = importlib.import_module(f"t5x_diffeq.cli.{verb}")
    given = [argument for argument in arguments if argument.startswith("--")]
    if verb == "convert":  # which has a config of its own accord
        given.insert(0, "--config=configs/default.py")
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", [verb, *given])  # config_flags finds the overrides there
    parse(module, sys.argv)


@pytest.mark.parametrize(("script", "arguments"), SCRIPTS)
def test_scripts_are_understood(script, arguments, tmp_path):
    """Options exist, and take these values; --dry-run prints what would be run."""
    words = [ROOT / "launch" / script, *arguments]
    if script in DRY:
        options = ["--dry-run", *(["--unchecked"] if script in CHECKED else [])]
        at = arguments.index("--") + 1 if "--" in arguments else len(words)
        words[at:at] = options
    elif script not in ("test.sh", "setup.sh"):
        assert all(word.partition("=")[0] in words[0].read_text() for word in arguments)
        return
    else:
        words.append("--help")
    ended = run_to_end(words)
    assert ended.returncode == 0, f"{shlex.join(map(str, words))}\n{ended.stderr}"


WITH_MARKED = [path for path in PAGES if MARK in path.read_text()]


@pytest.mark.slow
@pytest.mark.parametrize("path", WITH_MARKED, ids=lambda path: str(path.relative_to(ROOT)))
def test_marked_commands_run(path, tmp_path):
    """One after the other, on a small text; each word in capitals is a folder of the test."""
    blocks = list(marked(path.read_text()))
    assert blocks
    write_text(tmp_path).rename(tmp_path / "PATH")
    (tmp_path / "tinyshakespeare.txt").symlink_to(tmp_path / "PATH")
    for folder in ("configs", "examples"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    for block in blocks:
        for verb, arguments in of_verbs(commands(block)):
            if verb == "explore":  # which serves until Ctrl-C
                continue
            small = SETTINGS.get(verb, ())
            if any(each.startswith("--config.train.depths=") for each in arguments):
                small = [
                    each for each in small if "model.num_steps" not in each
                ]  # it is one of them
            set_here = {setting.partition("=")[0] for setting in small}
            given = [each for each in arguments if each.partition("=")[0] not in set_here]
            words = [warm_python.executable(), "-m", f"t5x_diffeq.{verb}", *given, *small]
            ended = run_to_end(
                words, cwd=tmp_path, env={**os.environ, "XLA_FLAGS": flags_of_processes()}
            )
            assert ended.returncode == 0, f"{shlex.join(words)}\n{ended.stderr}"
