"""What several test files use: small configs, and the package's functions of a config."""

import dataclasses
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import create_autospec

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from ml_collections import ConfigDict
from patience import patience

from configs import default
from t5x_diffeq.checkpoints.checkpoint import Checkpoints
from t5x_diffeq.cli import command_line
from t5x_diffeq.cli.train import train_to_end
from t5x_diffeq.cluster.signals import StopSignals
from t5x_diffeq.cluster.watchdog import Watchdog
from t5x_diffeq.config.config import Config, DataKeys, TrainKeys
from t5x_diffeq.data import corpus
from t5x_diffeq.data.corpus import Corpus
from t5x_diffeq.data.examples import TrainingData
from t5x_diffeq.system.files import AnyPath
from t5x_diffeq.training import loop, partitioning, setup
from t5x_diffeq.training.history import Clock, History, Stopwatch
from t5x_diffeq.training.hooks import Training
from t5x_diffeq.training.tracking.jsonl import read_metrics
from t5x_diffeq.training.tracking.trackers import RunWriter

SUPPORT = Path(__file__).resolve().parent  # this folder: scripts, recorded files, stand-ins
ROOT = SUPPORT.parents[1]
READMES = [path for path in ROOT.rglob("README.md") if not {".venv", "workdirs"} & set(path.parts)]
_BUILT = ROOT / "docs" / "notebooks"  # by launch/docs.sh
PAGES = sorted({*READMES, *(ROOT / "docs").rglob("*.md")} - {*_BUILT.glob("*.md")})
LENGTH_OF_LINES = 160  # of the model of `run_on_lines`; the harness pads sequences to 128 or 160


def numbered_lines(count: int) -> str:
    """A text of so many lines, no two the same."""
    return "".join(f"line {n} of the text, {n * n} squared.\n" for n in range(count))


LINES = numbered_lines(300)  # what `run_on_lines` was trained on


def small_config(text: Path) -> ConfigDict:
    """A run of seconds on the bytes of a text: width 16, two solver steps, six optimizer steps."""
    config = default.get_config()
    config.model.update(
        num_steps=2,
        embed_dim=16,
        num_heads=2,
        mlp_dim=32,
        time_embed_dim=4,
        num_frequencies=4,
        remat="none",
    )
    config.data.update(source="text_files", path=str(text), tokenizer="bytes", sequence_length=16)
    config.train.update(
        total_steps=6,
        batch_size=8,
        eval_batch_size=16,
        log_every=1,
        eval_every=3,
        checkpoint_every=2,
    )
    return config


def run_to_end(command: Sequence, **options) -> subprocess.CompletedProcess:
    """A command that has ended, by default in the project's folder, and what it said."""
    given = {"cwd": ROOT, "timeout": patience(1800), **options}
    return subprocess.run(command, capture_output=True, text=True, **given)


# The functions of the package that take a config or a part of it, each called in one place.


def setup_of(
    config: ConfigDict, vocab_size: int = 256, devices: Sequence[jax.Device] | None = None
) -> setup.Setup:
    return setup.make_setup(Config.of(config), vocab_size, devices)


def config_with_train(**keys: object) -> Config:
    config = Config.of(default.get_config())
    return config.with_values({f"train.{key}": value for key, value in keys.items()})


def train_config(**keys: object) -> TrainKeys:
    return dataclasses.replace(
        Config.of(default.get_config()).train, **{"loss_chunk": 2048, **keys}
    )


def corpus_of(
    data: ConfigDict, workdir: AnyPath, new: bool, vocab_size: int | None = None
) -> corpus.Corpus:
    return corpus.prepare_corpus(DataKeys(**data), workdir, new, vocab_size)


def mesh_of(
    config: ConfigDict, batch_size: int, devices: Sequence[jax.Device] | None = None
) -> Mesh:
    return partitioning.make_mesh(Config.of(config).mesh, batch_size, devices)


def rules_of(config: ConfigDict) -> partitioning.Rules:
    return partitioning.logical_rules(Config.of(config).mesh)


def auto_mesh(**sizes: int) -> Mesh:
    """A mesh of axes with these sizes, whose shardings the compiler chooses.

    The training's other axes are there too, of size 1, unless the axes are others altogether.
    """
    if sizes.keys() <= set(partitioning.AXES):
        sizes = mesh_shape(**sizes)
    types = (AxisType.Auto,) * len(sizes)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=types)


def assert_close(found, expected, tolerance=2e-5) -> None:
    """Two trees agree, each leaf to a part of its largest entry."""
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=tolerance * np.abs(b).max() + 1e-8),
        found,
        expected,
    )


def mesh_shape(**sizes: int) -> dict[str, int]:
    """The sizes of all axes of a mesh, 1 where none is given."""
    return {axis: sizes.get(axis, 1) for axis in partitioning.AXES}


def forget_flags(verb) -> None:
    """Lets a verb's command line be parsed as if for the first time: overrides are defined once."""
    for override in [name for name in verb.FLAGS if "." in name]:
        delattr(verb.FLAGS, override)
    if "config" in verb.FLAGS:
        vars(verb.FLAGS["config"]).get("_override_values", {}).clear()
    verb.FLAGS.unparse_flags()
    if "config" in verb.FLAGS and isinstance(given := verb.FLAGS["config"].value, str):
        # A verb that was imported while `sys.argv` had a --config keeps the default's name.
        verb.FLAGS["config"].value = verb.FLAGS["config"].parser.parse(given)


def parse(verb, arguments: Sequence[str]) -> None:
    """Parses a verb's command line."""
    forget_flags(verb)
    command_line.parse(list(arguments), verb.FLAGS)


def call(verb, *arguments: str):
    """Runs a verb's `main` with these arguments of the command line."""
    parse(verb, ["verb", *arguments])
    return verb.main()


def training_of(setup, workdir, tokenizer=None) -> Training:
    """A run for hooks to use, whose other parts are stand-ins that note how they are called."""
    kinds = {
        "checkpoints": Checkpoints,
        "history": History,
        "watchdog": Watchdog,
        "stop": StopSignals,
    }
    parts = {name: create_autospec(kind, instance=True) for name, kind in kinds.items()}
    parts["stop"].interruptible, parts["stop"].save_asked = iter, False
    corpus = create_autospec(Corpus, instance=True, tokenizer=tokenizer)
    data = create_autospec(TrainingData, instance=True)
    data.position.return_value = None
    training = Training(
        setup.config, setup, workdir, corpus, data, [], stopwatch=Stopwatch(), **parts
    )
    training.start, training.clock = 0, create_autospec(Clock, instance=True)
    training.writer = create_autospec(RunWriter, instance=True)
    return training


def stop_after(steps: int, config: Config, workdir: AnyPath, number: int = signal.SIGTERM) -> int:
    """The status of a training that gets a signal as the batch after so many steps is drawn."""
    batches_after = loop._batches_after

    def interrupt(*arguments):
        for n, batch in enumerate(batches_after(*arguments)):
            if n == steps:
                os.kill(os.getpid(), number)
            yield batch

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "_batches_after", interrupt)
        return train_to_end(config, workdir)


def metrics_of(workdir: AnyPath) -> list[dict]:
    """The lines of `metrics.jsonl`, without what depends on the machine."""
    return [without_machine(line) for line in read_metrics(workdir)]


def without_machine(line: dict) -> dict:
    """A report without its times, rates and sizes of memory, which differ from run to run."""
    machine = re.compile(r"train/(tokens_per_second|mfu|data_wait|goodput|.*_seconds|.*_gib)")
    return {name: value for name, value in line.items() if not machine.fullmatch(name)}


def assert_learns_and_resumes(config: ConfigDict, folder: Path) -> None:
    """A run is, bit for bit, itself continued from its checkpoint after two steps."""
    config = Config.of(config)
    assert train_to_end(config, folder) == 0
    lines = metrics_of(folder)
    for checkpoint in (folder / "checkpoints").iterdir():
        if checkpoint.name != "2":
            shutil.rmtree(checkpoint)
    assert train_to_end(config, folder) == 0
    assert metrics_of(folder) == lines
    losses = [line["eval/loss"] for line in lines if "eval/loss" in line]
    assert losses[-1] < losses[0] - 0.2
