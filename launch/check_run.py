"""Checks a run on this machine, before others are requested, and reports all problems at once.

    python launch/check_run.py --chip=tpu --count=64 --hosts=16 --slices=2 --example=COMMAND \
        [--missing=WHAT ...] -- --config=FILE --workdir=DIR [--config.KEY=VALUE ...]

The config is built with all its overrides. Its keys and values, the places of its data and its
workdir, and its mesh on so many devices are checked as `train` checks them; --count=0 leaves out
the mesh. What only the machines can see (their own folders, the data itself) is not checked.
--shared says that the machines see the files of this machine. With --dry_run, a bucket that doesn't
answer is only a note, because nothing is requested.
"""

import argparse
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from ml_collections import ConfigDict

from t5x_diffeq.cli import command_line, quiet_libraries
from t5x_diffeq.cli.failures import end_of
from t5x_diffeq.cli.verb_flags import VerbFlags
from t5x_diffeq.config.config import Config, DataKeys
from t5x_diffeq.config.plugins import is_plugin, load_plugin
from t5x_diffeq.data.named_source import part_configs
from t5x_diffeq.data.shards import read_manifest
from t5x_diffeq.data.sources import SOURCES
from t5x_diffeq.planner.topology import make_topology
from t5x_diffeq.system.errors import InfrastructureError, InputError
from t5x_diffeq.system.files import BUCKETS, files_in, files_matching, is_in_bucket, parse_path
from t5x_diffeq.training.checks import run_checks
from t5x_diffeq.training.partitioning import AXES, choose_mesh_sizes, describe_mesh
from t5x_diffeq.training.setup import expected_vocab_size, make_setup

NEED_PATH = {
    "text_files": "a file, folder or glob of text",
    "tokens": "the folder that prepare_data made",
    "tfds": "a name or folder of TensorFlow Datasets",
    "huggingface": "a name or folder",
    "stream": "a name, a folder or a glob",
}
DATA = "--config.data.source=tokens --config.data.path=gs://BUCKET/tokens"


@dataclass(frozen=True)
class PlannedDevice:
    """A device of a machine that is not requested yet: the attributes that the mesh needs."""

    platform: str
    process_index: int
    slice_index: int
    device_kind: str = "requested"


def planned_devices(platform: str, count: int, hosts: int, slices: int) -> list[PlannedDevice]:
    """All devices, slice by slice; `count` and `hosts` are of one slice."""
    per_host = max(1, count // hosts)
    return [
        PlannedDevice(platform, n * hosts + i // per_host, n)
        for n in range(slices)
        for i in range(count)
    ]


def config_of(arguments: list[str]) -> ConfigDict:
    """The config that `train` would see.

    Raises:
      InputError: naming the first invalid key or value.
    """
    sys.argv = ["train", *arguments]  # where ml_collections looks for overrides
    verb_flags = VerbFlags("check_run")
    config = verb_flags.define_config("")
    command_line.parse(sys.argv, verb_flags)
    return config.value


def apply_overrides(file: str, overrides: list[str], problems: list[str]) -> ConfigDict | None:
    """The config with the valid overrides; None if the file itself is invalid."""
    try:
        config_of([file])
    except InputError as error:
        problems.append(str(error))
        return None
    good = []
    for override in overrides:
        try:
            config_of([file, override])
            good.append(override)
        except InputError as error:
            problems.append(str(error))
    return config_of([file, *good])


def check_workdir(workdir: str) -> None:
    """Checks that a workdir in a bucket can be reached.

    Raises:
      InputError: if not.
    """
    if workdir.startswith(BUCKETS):
        parse_path(workdir, "--workdir")


def check_source(data: DataKeys, shared: bool) -> None:
    """Checks that the source exists, and that its path is given and, if reachable, not empty.

    A source of one's own is imported, but not called: what it reads may be on the machines alone.

    Args:
      data: `config.data`, of one source.
      shared: whether the machines see the files of this machine.

    Raises:
      InputError: if not.
    """
    if is_plugin(data.source):
        load_plugin("data.source", data.source)
        return
    if data.source != "tokens" and data.source not in SOURCES:
        known = ", ".join([*SOURCES, "tokens", "mixture"])
        raise InputError(f"data.source is {data.source!r}; it can be {known}")
    if data.source in NEED_PATH and not data.path:
        raise InputError(
            f"--config.data.path for data.source={data.source}: {NEED_PATH[data.source]}"
        )
    if data.source not in ("text_files", "tokens") and not str(data.path).startswith(BUCKETS):
        return
    path = parse_path(str(data.path), "data.path")
    here = shared and (path.exists() or files_matching(path))
    if not here and not is_in_bucket(path):
        note = f"data.path={data.path} must be on the machines; it can't be checked from here"
        print(f"note: {note}", file=sys.stderr)
        return
    if data.source == "tokens":
        read_manifest(path)
    elif not (files_in(path) or files_matching(path)):
        raise InputError(f"data.path={data.path}: nothing is there")


def check_sources(
    data: DataKeys, shared: bool, collect: Callable[[Callable[[], object]], None]
) -> None:
    """Checks every part of the data.

    Raises:
      InputError: if the mixture is invalid.
    """
    for part in part_configs(data):
        collect(partial(check_source, part, shared))


def check_mesh(config: Config, devices: list[PlannedDevice]) -> None:
    """Checks that the mesh fits the devices, and that the model and its batch fit the mesh.

    Raises:
      InputError: if not.
    """
    sizes = choose_mesh_sizes(config.mesh, config.train.batch_size, devices)
    config = config.with_values({f"mesh.{axis}": sizes[axis] for axis in AXES})
    # The shardings are the same on as many virtual devices of this machine.
    virtual = make_topology(f"cpu:{len(devices)}").devices
    make_setup(config, expected_vocab_size(config), virtual)
    print(f"the mesh: {describe_mesh(sizes)} on {len(devices)} devices", file=sys.stderr)


def check_model(config: Config) -> None:
    """Checks that model, optimizer and batch fit together, on any devices.

    Raises:
      InputError: if not.
    """
    config = config.with_values({f"mesh.{axis}": 1 for axis in AXES})
    make_setup(config, expected_vocab_size(config), make_topology("cpu:1").devices)


def find_problems(options: argparse.Namespace, arguments: list[str]) -> list[str]:
    """All problems of the workdir, the config, its data and its mesh, a line each."""
    problems = list(options.missing)

    def collect(check: Callable[[], object]) -> None:
        try:
            check()
        except (InputError, InfrastructureError) as error:
            message = " ".join(str(error).split())
            if options.dry_run and isinstance(error, InfrastructureError):
                print(f"note: not checked, the run will: {message}", file=sys.stderr)
            else:
                problems.append(message)

    file, workdir, *overrides = arguments
    collect(lambda: check_workdir(workdir.partition("=")[2]))
    given = apply_overrides(file, overrides, problems)
    if given is None:
        return problems
    if given.init_from or given.model.num_steps is None:
        problems.append("this config begins with another run's model; only `finetune` takes it")
        return problems
    config = Config.of(given)
    collect(lambda: run_checks("launch", config, new=False))  # the workdir may hold an older run
    collect(lambda: check_sources(config.data, options.shared, collect))
    if options.count:
        devices = planned_devices(options.chip, options.count, options.hosts, options.slices)
        collect(lambda: check_mesh(config, devices))
    else:
        collect(lambda: check_model(config))
    return problems


def main() -> int:
    """Prints what is wrong, a line each, and returns the exit status."""
    parser = argparse.ArgumentParser(usage=__doc__, allow_abbrev=False)
    parser.add_argument("--chip", default="tpu")
    for number in ("count", "hosts", "slices"):
        parser.add_argument(f"--{number}", type=int, default=1)
    for switch in ("shared", "dry_run"):
        parser.add_argument(f"--{switch}", action="store_true")
    parser.add_argument("--example", required=True)
    parser.add_argument("--missing", action="append", default=[])
    words = sys.argv[1:]
    end = words.index("--")
    options = parser.parse_args(words[:end])
    quiet_libraries.silence_libraries()
    os.environ["JAX_PLATFORMS"] = "cpu"
    try:
        problems = find_problems(options, words[end + 1 :])
    except BaseException as error:  # also of a config that wants to end the process
        return end_of(error)
    if not problems:
        return 0
    for problem in problems:
        print(f"  - {problem}", file=sys.stderr)
    needs_data = any("data." in problem for problem in problems)
    example = f"{options.example} {DATA}" if needs_data else options.example
    things = "1 setting is" if len(problems) == 1 else f"{len(problems)} settings are"
    print(f"error: {things} missing or invalid, as listed; for example: {example}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
