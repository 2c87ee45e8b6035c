"""Turns documents into token shards: --config=FILE --output=DIR [--shard=3/64].

What `config.data` describes is tokenised once, on all cores; then train with
--config.data.source=tokens --config.data.path=DIR. Killed and started again, it goes on with the
shards that are missing; the same input gives the same bytes, whatever the number of workers. With
--shard=3/64, as in a SLURM array, it makes part 3 of 64 (0 to 63); the command without --shard then
finishes.
"""

import json
import os
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

from absl import flags
from ml_collections import ConfigDict
from ml_collections.config_flags import config_flags

from t5x_diffeq import command_line
from t5x_diffeq.data.corpus import fingerprint_of, tokenised
from t5x_diffeq.data.shards import SPLITS, merge, read_facts, stem, write_shard
from t5x_diffeq.data.sources import Source, load_source
from t5x_diffeq.data.tokenizer import Tokenizer, load_tokenizer, make_tokenizer
from t5x_diffeq.errors import InputError, RunError
from t5x_diffeq.files import held
from t5x_diffeq.report import count, say

FLAGS = flags.FlagValues()
CONFIG = config_flags.DEFINE_config_file(
    "config", None, "Config file; its `data` says what to prepare.", flag_values=FLAGS
)
OUTPUT = flags.DEFINE_string("output", None, "Folder of the shards.", flag_values=FLAGS)
SHARDS = flags.DEFINE_integer("shards", 16, "Shards of each split.", flag_values=FLAGS)
SHARD = flags.DEFINE_string("shard", None, "i/n: only the i-th of n parts.", flag_values=FLAGS)
WORKERS = flags.DEFINE_integer("workers", os.cpu_count(), "Processes.", flag_values=FLAGS)


def prepare(
    data: ConfigDict, folder: Path, shards: int, workers: int, part: tuple[int, int]
) -> dict | None:
    """Makes the shards of one part; with all of them there, checks them and ends with a manifest.

    Args:
      data: `config.data`.
      folder: of the shards.
      shards: of each split.
      workers: processes.
      part: (i, n), the i-th of n parts; (0, 1) is all.

    Returns:
      The manifest, if this was all.

    Raises:
      InputError: if the data can't be used, or the folder holds shards of something else.
      RunError: if a shard can't be written.
    """
    source = load_source(data)
    tokenizer = load_tokenizer(folder / "tokenizer")
    if tokenizer is None:
        tokenizer = make_tokenizer(data, source.train)  # deterministic: any part makes the same
        tokenizer.save(folder / "tokenizer")
    facts = {
        "source": source.name,
        "fingerprint": fingerprint_of(source, tokenizer),
        "tokenizer": tokenizer.fingerprint,
        "vocab_size": tokenizer.vocab_size,
    }
    mine = [(split, n) for split in SPLITS for n in range(shards)][part[0] :: part[1]]
    missing = [(s, n) for s, n in mine if not is_made(folder, stem(s, n, shards), facts)]
    say(f"{source.name}: {len(missing)} of {len(mine)} shards to make, {workers} workers")
    make_shards(source, tokenizer, folder, shards, missing, facts, workers)
    if part[1] > 1:
        say("this part is made; when all are, the command without --shard finishes")
        return None
    return merge(folder, shards, facts)


def is_made(folder: Path, name: str, facts: dict) -> bool:
    """Whether the shard is whole.

    Raises:
      InputError: if it was made from something else.
    """
    found = read_facts(folder, name)
    if found is not None and found["fingerprint"] != facts["fingerprint"]:
        raise InputError(
            f"--output={folder} holds shard {name} of {found['source']}, not of {facts['source']} "
            "as it is now; choose another folder, or delete this one"
        )
    return found is not None


def make_shards(
    source: Source,
    tokenizer: Tokenizer,
    folder: Path,
    shards: int,
    missing: list[tuple[str, int]],
    facts: dict,
    workers: int,
) -> None:
    """Makes the missing shards, several at a time, and tells of each."""
    done = 0
    with ProcessPoolExecutor(min(workers, len(missing) or 1), get_context("spawn")) as pool:
        begun = []
        for split, n in missing:
            documents = getattr(source, split)
            own = documents[len(documents) * n // shards : len(documents) * (n + 1) // shards]
            begun.append(pool.submit(make_shard, own, folder, stem(split, n, shards), facts))
        for future in as_completed(begun):
            made, done = result(future, folder), done + 1
            say(f"shard {done}/{len(missing)}: {count(made['tokens'])} tokens")


def result(future: object, folder: Path) -> dict:
    """A finished shard's facts.

    Raises:
      RunError: if it couldn't be written.
    """
    try:
        return future.result()
    except OSError as error:
        raise RunError(
            f"a shard of {folder} can't be written: {error.strerror or error}; the finished ones "
            "are kept: mend this and start again"
        ) from error


def make_shard(documents: list[str], folder: Path, name: str, facts: dict) -> dict:
    """Tokenises and writes one shard; runs in a process of its own."""
    tokenizer = load_tokenizer(folder / "tokenizer")
    return write_shard(folder, name, tokenised(documents, tokenizer), facts)


def parse_part(value: str | None) -> tuple[int, int]:
    """(i, n) of `i/n`.

    Raises:
      InputError: if it is not that, with 0 <= i < n.
    """
    index, _, parts = (value or "0/1").partition("/")
    if not (index.isdecimal() and parts.isdecimal() and int(index) < int(parts)):
        raise InputError(f"--shard={value} is not i/n with i from 0 to n - 1, such as 3/64")
    return int(index), int(parts)


def main() -> None:
    """The verb."""
    if CONFIG.value is None:
        raise InputError("prepare_data needs --config=FILE and --output=DIR; see --help")
    for flag in (SHARDS, WORKERS):
        if flag.value < 1:
            raise InputError(f"--{flag.name}={flag.value} must be at least 1")
    folder, part = command_line.folder(OUTPUT, "prepare_data"), parse_part(SHARD.value)
    lock = folder / f".lock-{part[0]}-of-{part[1]}"
    with held(lock, f"--output={folder}"):
        manifest = prepare(CONFIG.value.data, folder, SHARDS.value, WORKERS.value, part)
    if manifest is not None:
        say(
            *(f"{s}: {count(manifest[s]['tokens'])} tokens" for s in SPLITS),
            f"train with --config.data.source=tokens --config.data.path={folder}",
        )
        print(json.dumps({s: manifest[s]["tokens"] for s in SPLITS}), flush=True)


if __name__ == "__main__":
    command_line.run(main, __doc__, FLAGS)
