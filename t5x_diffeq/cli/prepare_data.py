"""Turns documents into token shards: --config=FILE --output=DIR [--shard=3/64].

Tokenises the documents of `config.data` once, on all cores. Then train with
--config.data.source=tokens --config.data.path=DIR. The same command again makes only the shards
that are missing. The same input gives the same bytes with any number of workers. --shard=3/64 makes
part 3 of 64 (0 to 63), for an array of jobs; afterwards the command without --shard completes the
folder.
"""

import json
import os

from t5x_diffeq.cli import flag_values
from t5x_diffeq.cli.verb_flags import VerbFlags
from t5x_diffeq.config.config import DataKeys
from t5x_diffeq.config.keys.values import MOST_SHARDS, THREADS
from t5x_diffeq.system.console import format_count, log, print_result
from t5x_diffeq.system.errors import InputError
from t5x_diffeq.system.files import AnyPath, digest
from t5x_diffeq.system.locks import hold_lock

FLAGS = VerbFlags(__name__)
CONFIG = FLAGS.define_config("Config file; its `data` section describes the documents.")
_OUTPUT = FLAGS.define_text("output", "Folder for the shards.")
_SHARDS = FLAGS.define_integer("shards", "Number of shards of each split.", 16, 1, MOST_SHARDS)
_SHARD = FLAGS.define_text("shard", "Make only part i of n, as i/n.")
_WORKERS = FLAGS.define_integer(
    "workers",
    "Number of processes. [default: one per core for a large source, else one]",
    None,
    1,
    THREADS,
)


def main() -> None:
    """Runs the verb."""
    if CONFIG.value is None:
        raise InputError("prepare_data needs --config=FILE and --output=DIR; see --help")
    data = DataKeys(**CONFIG.value.data)  # the rest of the config may be incomplete
    folder, part = (
        flag_values.parse_folder(_OUTPUT, "prepare_data"),
        flag_values.parse_part(_SHARD),
    )
    if part[1] > 2 * _SHARDS.value:
        raise InputError(
            f"--shard={_SHARD.value}: {part[1]} parts need more than --shards={_SHARDS.value}; set "
            f"--shards={part[1]} for every part, and in the last command"
        )
    prepare_data(data, folder, _SHARDS.value, _WORKERS.value, part)


def prepare_data(
    data: DataKeys, folder: AnyPath, shards: int, workers: int | None, part: tuple[int, int]
) -> None:
    """Makes a part of the shards, and with the last part the manifest.

    Args:
      workers: number of processes that tokenise; None: one for each core if the source is large.
        Each process imports for seconds. Meanwhile one process would tokenise several megabytes,
        as it uses all cores.
      part: (i, n), the i-th of n parts.
    """
    from t5x_diffeq.checkpoints.identity import run_of
    from t5x_diffeq.data.corpus import stored_fingerprint
    from t5x_diffeq.data.manifest import MASKS, SPLITS
    from t5x_diffeq.data.named_source import check_paths, load_source
    from t5x_diffeq.data.preparation import prepare_shards
    from t5x_diffeq.data.recipe import tokenizer_in
    from t5x_diffeq.data.sources import STREAM

    check_paths(data)
    if run_of(folder) is not None or stored_fingerprint(folder) is not None:
        raise InputError(f"--output={folder} is the workdir of a run; name another folder")
    if data.source == STREAM:
        raise InputError(
            f"data.source={STREAM} is read while the model trains; leave prepare_data out, or set "
            "data.source=huggingface or text_files to tokenise ahead"
        )
    lock = folder / f".lock-{part[0]}-of-{part[1]}"
    with hold_lock(lock, f"--output={folder}"):
        source = load_source(data)
        text = digest([source.fingerprint.encode()])
        tokenizer = tokenizer_in(folder / "tokenizer", data, source.train, text)
        workers = workers or (source.large and os.cpu_count()) or 1
        manifest = prepare_shards(source, tokenizer, folder, shards, workers, part)
    if manifest is not None:
        masks = " --config.data.loss_on=completion" if manifest.get(MASKS) else ""
        log(
            *(f"{s}: {_describe(manifest, s)}" for s in SPLITS),
            f"train with --config.data.source=tokens --config.data.path={folder}{masks}",
        )
        print_result(json.dumps({s: manifest[s]["tokens"] for s in SPLITS}))


def _describe(manifest: dict, split: str) -> str:
    """`1.20M tokens`, or for conversations also how many of them have a loss."""
    from t5x_diffeq.data.manifest import MASKS, TRAINED

    tokens = f"{format_count(manifest[split]['tokens'])} tokens"
    if not manifest.get(MASKS):
        return tokens
    trained = format_count(manifest[split][TRAINED])
    return f"{manifest[split]['documents']} conversations, {trained} of {tokens} have a loss"
