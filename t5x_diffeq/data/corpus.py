"""The tokenised data of a workdir: made once or read from shards, checked on every run."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Integer
from ml_collections import ConfigDict

from t5x_diffeq.data.packing import DocumentsInRow, TokenDocuments
from t5x_diffeq.data.shards import SPLITS, ShardedDocuments, read_manifest, token_dtype
from t5x_diffeq.data.sources import Source, load_source
from t5x_diffeq.data.tokenizer import Tokenizer, load_tokenizer, make_tokenizer
from t5x_diffeq.errors import InputError
from t5x_diffeq.files import digest, save_array, write_whole

FINGERPRINT_FILE = "data.json"


@dataclass(frozen=True)
class Corpus:
    """Both splits as tokenised documents, each closed by `end_of_text`."""

    name: str
    tokenizer: Tokenizer
    train: TokenDocuments
    validation: TokenDocuments
    fingerprint: str


def prepare_corpus(data: ConfigDict, workdir: Path, new: bool) -> Corpus:
    """The corpus of a run.

    Args:
      data: `config.data`.
      workdir: keeps the tokenizer, the tokens (or where their shards are) and the fingerprint.
      new: make all of these; else they must be there, and the data unchanged.

    Raises:
      InputError: if the data can't be used, or isn't what the workdir was begun with.
    """
    if data.source == "tokens":
        return from_shards(data, workdir, new)
    source = load_source(data)
    if new:
        make_corpus(data, source, workdir)
    corpus = load_prepared(workdir)
    check_unchanged(corpus, source.name, fingerprint_of(source, corpus.tokenizer), workdir)
    return corpus


def from_shards(data: ConfigDict, workdir: Path, new: bool) -> Corpus:
    """The corpus that `prepare_data` left in `data.path`."""
    if not data.path:
        raise InputError(
            "data.path is not set; data.source=tokens needs --config.data.path=DIR, a folder that "
            "`python -m t5x_diffeq.prepare_data` made"
        )
    folder = Path(data.path).expanduser().absolute()
    manifest = read_manifest(folder)
    if new:
        tokenizer = load_tokenizer(folder / "tokenizer")
        if tokenizer is None or tokenizer.fingerprint != manifest["tokenizer"]:
            raise InputError(
                f"data.path={folder}: its tokenizer is not the one that its shards were made with; "
                "prepare them again"
            )
        tokenizer.save(workdir / "tokenizer")
        write_facts(workdir, manifest["source"], fingerprint_of_shards(manifest), folder)
    corpus = load_prepared(workdir)
    check_unchanged(corpus, manifest["source"], fingerprint_of_shards(manifest), workdir)
    return corpus


def check_unchanged(corpus: Corpus, name: str, fingerprint: str, workdir: Path) -> None:
    """The data is what the workdir was begun with.

    Raises:
      InputError: if it isn't.
    """
    if corpus.fingerprint != fingerprint:
        raise InputError(
            f"workdir {workdir} was begun on {corpus.name} (fingerprint "
            f"{corpus.fingerprint[:12]}), but the data is now {name} "
            f"({fingerprint[:12]}); restore that data or choose a new --workdir"
        )


def make_corpus(data: ConfigDict, source: Source, workdir: Path) -> None:
    """Trains the tokenizer where the config says so, and tokenises both splits."""
    tokenizer = make_tokenizer(data, source.train)
    tokenizer.save(workdir / "tokenizer")
    for split in SPLITS:
        documents = list(tokenised(getattr(source, split), tokenizer))
        empty = np.zeros(0, token_dtype(tokenizer.vocab_size))
        save_array(workdir / "data" / f"{split}.npy", np.concatenate([empty, *documents]))
        lengths = np.array([len(tokens) for tokens in documents], np.uint32)
        save_array(workdir / "data" / f"{split}.lengths.npy", lengths)
    write_facts(workdir, source.name, fingerprint_of(source, tokenizer), None)


def tokenised(
    documents: Sequence[str], tokenizer: Tokenizer
) -> Iterator[Integer[np.ndarray, " length"]]:
    """The tokens of each document with `end_of_text`, in the smallest dtype."""
    dtype = token_dtype(tokenizer.vocab_size)
    for tokens in tokenizer.encode(documents):
        yield np.append(tokens, tokenizer.end_of_text).astype(dtype)


def write_facts(workdir: Path, name: str, fingerprint: str, shards: Path | None) -> None:
    """Writes `data.json`."""
    facts = {"source": name, "fingerprint": fingerprint, "shards": shards and str(shards)}
    write_whole(workdir / FINGERPRINT_FILE, json.dumps(facts, indent=2).encode())


def load_prepared(workdir: Path) -> Corpus:
    """The corpus that a run left in its workdir; of the data itself, only shards are needed.

    Raises:
      InputError: if no run prepared it, or it can't be read any more.
    """
    tokenizer = load_tokenizer(workdir / "tokenizer")
    try:
        facts = json.loads((workdir / FINGERPRINT_FILE).read_text())
        splits = {split: load_split(workdir, facts["shards"], split) for split in SPLITS}
    except InputError:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        if not (workdir / FINGERPRINT_FILE).exists():
            raise InputError(f"workdir {workdir} holds no run; train there first") from error
        raise InputError(
            f"the data that workdir {workdir} keeps can't be read: {error}; restore it or train in "
            "a new --workdir"
        ) from error
    if tokenizer is None:
        raise InputError(f"workdir {workdir} has lost its tokenizer/; train in a new one")
    return Corpus(facts["source"], tokenizer, **splits, fingerprint=facts["fingerprint"])


def load_split(workdir: Path, shards: str | None, split: str) -> TokenDocuments:
    """A split's documents, from the shards or the workdir's own tokens."""
    if shards:
        return ShardedDocuments(Path(shards), read_manifest(Path(shards))[split]["names"])
    tokens = np.load(workdir / "data" / f"{split}.npy", mmap_mode="r")
    return DocumentsInRow(tokens, np.load(workdir / "data" / f"{split}.lengths.npy"))


def fingerprint_of(source: Source, tokenizer: Tokenizer) -> str:
    """A hash of all that decides the tokens."""
    return digest([source.fingerprint.encode(), tokenizer.fingerprint.encode()])


def fingerprint_of_shards(manifest: dict) -> str:
    """The same, of prepared shards."""
    return digest([hash.encode() for split in SPLITS for hash in manifest[split]["sha256"]])
