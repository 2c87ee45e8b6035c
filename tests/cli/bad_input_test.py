"""Whatever a key or flag is set to, a verb starts its work, or ends with one line and status 2.

`launch/test.sh tests/cli/bad_input_test.py -s` prints how many cases there are.
"""

import importlib
import os
import sys
from collections import Counter
from pathlib import Path

import pytest
from absl import flags
from helpers import SUPPORT, forget_flags, run_to_end
from ml_collections.config_flags import config_flags

from t5x_diffeq.cli import VERBS, command_line
from t5x_diffeq.cli.train import train_to_end
from t5x_diffeq.config.config import KEYS, Config, flatten
from t5x_diffeq.system.errors import InputError
from t5x_diffeq.training import loop
from t5x_diffeq.training.setup import make_setup

NUMBERS = ("nan", "inf", "-inf", "-2", "0", "1e300", "1000000000000", "1.5", "many", "True")
TEXTS = ("", "nope", "0", "None", "[1, 2]", "('a',)", "x" * 300, "s3://bucket", "/dev/null")
VALUES = (None, True, -2, 0, 1.5, 10**12, float("nan"), "", "nope", (0,), [None], b"")
NO_NUMBER = {"nan", "inf", "-inf", "-2", "many"}
NEVER = {int: NO_NUMBER | {"1e300", "1000000000000", "1.5"}, float: NO_NUMBER | {"1e300"}}
OF_A_TYPE = 4  # keys or flags of each type that are tried
CASES = Counter()


class EndOfChecksError(BaseException):
    """The checks are over, and the work would begin."""


def end_checks(*_, **__):
    raise EndOfChecksError


@pytest.fixture
def end(monkeypatch, capsys):
    """Calls a verb as its command line does; the error that it ends with, or None."""
    status_of = command_line.end_of

    def end_of(error):
        if isinstance(error, EndOfChecksError):
            raise error
        return status_of(error)

    monkeypatch.setattr(command_line, "end_of", end_of)

    def end(main, own, *arguments):
        argv = ["verb", *arguments]
        monkeypatch.setattr(sys, "argv", argv)
        try:
            command_line.run(main, "", own)
        except EndOfChecksError:
            capsys.readouterr()  # such as notes
            CASES["legal"] += 1
            return None
        except SystemExit as ended:
            lines = capsys.readouterr().err.splitlines(keepends=True)
            said = "".join(line for line in lines if not line.startswith("note: "))
            assert ended.code == 2, (arguments, ended.code, said)
            assert said.startswith("error: ") and said.count("\n") == 1, (arguments, said)
            CASES["refused"] += 1
            return said
        raise AssertionError(f"{arguments}: it neither began nor ended")

    yield end
    with capsys.disabled():
        print(f" {CASES['refused']} refused, {CASES['legal']} legal", end="")


# --------------------------------------------------------------------------------- keys


def test_the_table_knows_what_the_code_knows():
    from t5x_diffeq.cli import reproduce
    from t5x_diffeq.config.keys import values
    from t5x_diffeq.data import sources as documents
    from t5x_diffeq.experiments.paper import PAPER
    from t5x_diffeq.model.adaptive import SOLVERS
    from t5x_diffeq.model.ode.solvers import SCHEMES
    from t5x_diffeq.model.ode.sources import SOURCES
    from t5x_diffeq.model.ode.time_basis import TIME_BASES
    from t5x_diffeq.training.optimizers.optimizer import DECAYED, OPTIMIZERS

    assert KEYS["optimizer.decay"].values.choices == tuple(DECAYED)
    assert tuple(SCHEMES) == values.SCHEMES
    assert tuple(SOURCES) == values.WEIGHTS
    assert {*documents.SOURCES, "tokens", "mixture"} == {*values.SOURCES}
    assert tuple(TIME_BASES) == values.TIME_BASES
    assert tuple(OPTIMIZERS) == values.OPTIMIZERS
    assert tuple(SOLVERS) == values.ADAPTIVE_SOLVERS
    assert tuple(PAPER) == reproduce.EXPERIMENTS


@pytest.fixture
def config_file(tmp_path):
    """The smallest model, whose setup takes no time."""
    path = tmp_path / "small.py"
    path.write_text(
        "import sys\n"
        f"sys.path.append({str(SUPPORT)!r})\n"
        "from helpers import small_config\n"
        "def get_config():\n"
        f"    return small_config({str(tmp_path / 'text.txt')!r})\n"
    )
    (tmp_path / "text.txt").write_text("a text\n" * 100)
    return path


SETUPS = {}


def setup_of(config, vocab_size):
    """A setup, made once for hundreds of configs of the same model: each takes seconds."""
    shapes = (config.seed, config.model, config.train, config.optimizer, config.mesh)
    key = (shapes, vocab_size, config.data.sequence_length, config.data.cross_documents)
    if key not in SETUPS:
        SETUPS[key] = make_setup(config, vocab_size)
    return SETUPS[key]


def by_type(things, type_of):
    """The things of each type, by the type's name."""
    types = {}
    for each in things:
        types.setdefault(type_of(each).__name__, []).append(each)
    return types


KEYS_BY_TYPE = by_type(KEYS, lambda key: KEYS[key].values.type)


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize("kind", KEYS_BY_TYPE)
def test_keys_of_every_type(end, config_file, tmp_path, monkeypatch, kind, sample):
    """Through the command line; what it can't say, through Python."""
    monkeypatch.setattr(loop, "prepare_corpus", end_checks)
    monkeypatch.setattr(loop, "make_setup", setup_of)

    def main():
        return train_to_end(Config.of(config.value), tmp_path / "run")

    for key in sample(KEYS_BY_TYPE[kind], most=OF_A_TYPE):
        for text in sample(NUMBERS + TEXTS):
            own = flags.FlagValues()
            config = config_flags.DEFINE_config_file("config", None, "", flag_values=own)
            said = end(main, own, f"--config={config_file}", f"--config.{key}={text}")
            if text in NEVER.get(KEYS[key].values.type, ()):
                assert said and key in said, (key, text, said)
        for value in sample(VALUES):
            own = flags.FlagValues()
            config = config_flags.DEFINE_config_file("config", None, "", flag_values=own)
            own(["verb", f"--config={config_file}"])
            with config.value.ignore_type(), config.value.unlocked():
                config.value.update_from_flattened_dict({key: value})
            said = end(main, flags.FlagValues())
            if KEYS[key].values.fault(flatten(config.value)[key]):
                assert said and key in said, (key, value, said)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("model.embed_dim", 40_000_000, r"at least [0-9,]+ GiB on each device, which has [0-9]+"),
        ("train.batch_size", 2**31 - 8, r"at least [0-9,]+ GiB on each device"),
        ("data.sequence_length", 10**12, "it must be at most 2147483647"),
        (
            "mesh.rules",
            (("batch", ("data", "data")),),
            r"mesh.rules has \('batch', \('data', 'data'",
        ),
        ("model.scan_unroll", 3, r"model.scan_unroll=3 is more than model.num_steps=2"),
    ],
)
def test_absurd_sizes_are_refused_before_anything_is_made(small, tmp_path, key, value, message):
    small.update_from_flattened_dict({key: value})
    with pytest.raises(InputError, match=message):
        train_to_end(Config.of(small), tmp_path / "run")
    assert not (tmp_path / "run").exists()


# -------------------------------------------------------------------------------- flags

# Of each verb: arguments that are good, and the functions that begin when they are.
GOOD = {
    "train": (["--config={config}", "--workdir={new}"], ["training.loop.prepare_corpus"]),
    "finetune": (
        [
            "--config=configs/finetune.py:lora",
            "--config.init_from={run}",
            "--config.data.source=text_files",
            "--workdir={new}",
        ],
        ["cli.finetune.train_to_end"],
    ),
    "evaluate": (["--workdir={run}"], ["training.load.load_run", "cli.evaluate._evaluate_tasks"]),
    "generate": (["--workdir={run}"], ["training.load.load_run"]),
    "status": (["--workdir={run}"], ["training.run_status.RunStatus"]),
    "prepare_data": (["--config={config}", "--output={new}"], ["data.named_source.load_source"]),
    "benchmark": (["--config={config}"], ["planner.comparison.compare_models"]),
    "explore": (["--workdir={run}", "--port=0"], ["inference.trained_run.load"]),
    "plan": (["--config={config}", "--topology=cpu:1"], ["cli.plan.show_plans", "cli.plan.sweep"]),
    "analyze": (
        ["--what=spectra", "--workdir={run}", "--output={new}"],
        ["training.load.load_run"],
    ),
    "export": (["--workdir={run}", "--output={new}"], ["training.load.load_run"]),
    "convert": (["--input={run}", "--workdir={new}"], ["cli.convert.load_folder"]),
    "sweep": (
        ["--config={config}", "--output={new}", "--grid=model.num_steps=1,2"],
        ["experiments.runs.carry_out", "experiments.runs.part_of"],
    ),
    "reproduce": (
        ["--experiment=table1", "--output={new}", "--text=a={file}"],
        ["experiments.runs.carry_out", "experiments.runs.part_of"],
    ),
}
FOLDERS = ("workdir", "output", "input")


def test_every_verb_is_tried():
    assert GOOD.keys() == set(VERBS)


def bad_values(flag, folder):
    """Values for a flag, and whether none of them can be used."""
    if isinstance(flag.parser, flags.IntegerParser | flags.FloatParser):
        yield from ((text, text in NO_NUMBER) for text in NUMBERS)
        yield "", True
        return
    yield from ((text, False) for text in NUMBERS + TEXTS[1:])
    yield "", not isinstance(flag, flags.BooleanFlag)
    file = folder / "file"
    yield from ((path, flag.name in FOLDERS) for path in (file, file / "folder"))
    yield folder / "empty", False


def flags_of(verb):
    return importlib.import_module(f"t5x_diffeq.cli.{verb}").FLAGS


FLAGS_BY_TYPE = by_type(
    ((verb, name) for verb in VERBS for name in flags_of(verb) if "." not in name),
    lambda flag: type(flags_of(flag[0])[flag[1]].parser),
)


@pytest.fixture
def try_flags(end, config_file, tmp_path, run_on_lines, monkeypatch):
    """Calls a verb with good arguments and some others; the error that it ends with, or None."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("a file")
    (tmp_path / "empty").mkdir()
    paths = {"run": run_on_lines, "config": config_file, "new": tmp_path / "new"}
    paths |= {"file": tmp_path / "file"}

    def try_flags(verb, *more):
        module, (arguments, works) = importlib.import_module(f"t5x_diffeq.cli.{verb}"), GOOD[verb]
        names = {each.split("=")[0] for each in more}
        good = [argument.format(**paths) for argument in arguments]
        kept = [each for each in good if each.split("=")[0] not in names]
        forget_flags(module)
        with monkeypatch.context() as patch:
            for name in works:
                patch.setattr(f"t5x_diffeq.{name}", end_checks)
            return end(module.main, module.FLAGS, *kept, *more)

    return try_flags


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize("kind", FLAGS_BY_TYPE)
def test_flags_of_every_type(try_flags, tmp_path, kind, sample):
    for verb, name in sample(FLAGS_BY_TYPE[kind], most=OF_A_TYPE):
        flag = flags_of(verb)[name]
        for text, never in sample(bad_values(flag, tmp_path)):
            said = try_flags(verb, f"--{name}={text}")
            if never:
                assert said and f"--{name}" in said, (verb, name, text, said)
        try_flags(verb, f"--{name}")
        if not isinstance(flag, flags.MultiFlag):
            assert "is given 2 times" in try_flags(verb, f"--{name}=a", f"--{name}=b")


@pytest.mark.slow
@pytest.mark.parametrize("verb", VERBS)
def test_what_no_verb_understands(try_flags, verb):
    assert try_flags(verb) is None
    assert "not a flag of this verb" in try_flags(verb, "--nope=1")
    assert "not understood" in try_flags(verb, "more")


@pytest.mark.slow
@pytest.mark.skipif(Path("/dev/nvidia0").exists(), reason="this machine has a GPU")
def test_a_platform_that_this_machine_lacks(tmp_path):
    ended = run_to_end(
        [
            *(sys.executable, "-m", "t5x_diffeq.train", "--config=configs/tiny.py"),
            f"--workdir={tmp_path / 'run'}",
        ],
        env={**os.environ, "JAX_PLATFORMS": "cuda"},
    )
    assert ended.returncode == 2, ended.stderr
    assert ended.stderr.startswith("error: JAX_PLATFORMS=cuda: JAX finds no such device")
    assert ended.stderr.count("\n") == 1
