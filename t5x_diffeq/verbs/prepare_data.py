"""Token shards of the documents that a config describes."""

import json
import os

from t5x_diffeq.data.manifest import MASKS, SPLITS, TRAINED
from t5x_diffeq.data.preparation import prepare_shards
from t5x_diffeq.data.recipe import tokenizer_in
from t5x_diffeq.data.sources import STREAM, check_paths, load_source
from t5x_diffeq.runtime.config import DataKeys
from t5x_diffeq.runtime.console import format_count, say
from t5x_diffeq.runtime.errors import InputError
from t5x_diffeq.runtime.files import AnyPath, digest
from t5x_diffeq.runtime.locks import hold_lock


def prepare_data(
    data: DataKeys, folder: AnyPath, shards: int, workers: int | None, part: tuple[int, int]
) -> None:
    """Makes a part of the shards, and with the last part the manifest.

    Args:
      data: `config.data`.
      folder: the folder of the shards.
      shards: number of shards of each split.
      workers: number of processes that tokenise; None: one for each core if the source is large.
        Each imports for seconds, in which one alone tokenises several megabytes on all cores.
      part: (i, n), the i-th of n parts.
    """
    check_paths(data)
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
        say(
            *(f"{s}: {_describe(manifest, s)}" for s in SPLITS),
            f"train with --config.data.source=tokens --config.data.path={folder}{masks}",
        )
        print(json.dumps({s: manifest[s]["tokens"] for s in SPLITS}), flush=True)


def _describe(manifest: dict, split: str) -> str:
    """`1.20M tokens`, or for conversations also how many of them have a loss."""
    tokens = f"{format_count(manifest[split]['tokens'])} tokens"
    if not manifest.get(MASKS):
        return tokens
    trained = format_count(manifest[split][TRAINED])
    return f"{manifest[split]['documents']} conversations, {trained} of {tokens} have a loss"
