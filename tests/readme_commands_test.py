"""The commands of the READMEs: all are understood, and those marked `<!-- tested -->` run."""

import importlib
import os
import re
import shlex
import subprocess
import sys

import pytest
import warm_python
from compilation import flags_of_processes
from helpers import READMES, ROOT, parse
from process_runs import write_text

MARK = "<!-- tested -->\n\n"
PYTHON = re.compile(r"(?:\.venv/bin/)?python -m t5x_diffeq\.(\w+) (.*)")
SMALL_MODEL = (
    *("--config.model.embed_dim=32", "--config.model.time_embed_dim=48"),
    *("--config.data.sequence_length=64", "--config.train.batch_size=8"),
)
BYTES = ("--config.data.tokenizer=bytes",)
SHORT_RUN = (
    *("--config.train.total_steps=4", "--config.train.eval_batches=2"),
    *("--config.train.eval_batch_size=8", "--config.train.log_every=1"),
)
SETTINGS = {  # that make a command small
    "prepare_data": BYTES,
    "train": (*SMALL_MODEL, *SHORT_RUN, *BYTES),
    "finetune": ("--config.train.batch_size=8", *SHORT_RUN),
    "evaluate": ("--eval_batches=2",),
}


def commands(text):
    """The lines of the indented blocks of a README, those that go on joined, without comments."""
    blocks = re.findall(r"(?:^    .*\n?)+", text, re.M)
    lines = re.sub(r"\\\n\s*", "", "".join(blocks)).splitlines()
    return [line.strip().partition("  #")[0].strip() for line in lines]


def of_verbs(lines):
    """The verb and the arguments of each line that runs one; of alternatives the first."""
    for line in lines:
        if found := PYTHON.fullmatch(line):
            verb, rest = found.groups()
            plain = re.sub(r"[][]", "", re.sub(r"\|\S+", "", rest))
            yield verb, shlex.split(plain)


ALL = [
    pytest.param(verb, arguments, id=f"{path.relative_to(ROOT)}-{verb}-{number}")
    for path in READMES
    for number, (verb, arguments) in enumerate(of_verbs(commands(path.read_text())))
]


def test_commands_are_found():
    assert len(ALL) > 20


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


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize("path", READMES, ids=lambda path: str(path.relative_to(ROOT)))
def test_marked_commands_run(path, tmp_path):
    """One after the other, on a small text; each word in capitals is a folder of the test."""
    marked = path.read_text().split(MARK)[1:]
    if not marked:
        pytest.skip("this README has no such commands")
    write_text(tmp_path).rename(tmp_path / "PATH")
    (tmp_path / "tinyshakespeare.txt").symlink_to(tmp_path / "PATH")
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    for block in marked:
        for verb, arguments in of_verbs(commands(block.partition("\n\n")[0])):
            small = SETTINGS.get(verb, ())
            set_here = {setting.partition("=")[0] for setting in small}
            given = [each for each in arguments if each.partition("=")[0] not in set_here]
            words = [warm_python.executable(), "-m", f"t5x_diffeq.{verb}", *given, *small]
            ended = subprocess.run(
                words,
                cwd=tmp_path,
                env={**os.environ, "XLA_FLAGS": flags_of_processes()},
                capture_output=True,
                text=True,
            )
            assert ended.returncode == 0, f"{shlex.join(words)}\n{ended.stderr}"
