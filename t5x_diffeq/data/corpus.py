"""The tokens of a workdir's data: made once, kept beside the tokenizer, checked on every run."""

import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Integer
from ml_collections import ConfigDict

from t5x_diffeq.data.sources import Source, load_source
from t5x_diffeq.data.tokenizer import Tokenizer, load_tokenizer, make_tokenizer
from t5x_diffeq.errors import InputError
from t5x_diffeq.files import digest, write_whole

FINGERPRINT_FILE = "data.json"


@dataclass(frozen=True)
class Corpus:
    """Both splits as one row of tokens each, every document closed by `end_of_text`."""

    name: str
    tokenizer: Tokenizer
    train: Integer[np.ndarray, " train_tokens"]
    validation: Integer[np.ndarray, " validation_tokens"]
    fingerprint: str


def prepare_corpus(data: ConfigDict, workdir: Path, new: bool) -> Corpus:
    """The corpus of a run.

    Args:
      data: `config.data`.
      workdir: keeps the tokenizer, the tokens and the data's fingerprint.
      new: make all of these; else they must be there, and the data unchanged.

    Raises:
      InputError: if the data can't be used, or isn't what the workdir was begun with.
    """
    source = load_source(data)
    if new:
        make_corpus(data, source, workdir)
    corpus = load_prepared(workdir)
    fingerprint = fingerprint_of(source, corpus.tokenizer)
    if corpus.fingerprint != fingerprint:
        raise InputError(
            f"workdir {workdir} was begun on {corpus.name} (fingerprint "
            f"{corpus.fingerprint[:12]}), but the data is now {source.name} "
            f"({fingerprint[:12]}); restore that data or choose a new --workdir"
        )
    return corpus


def make_corpus(data: ConfigDict, source: Source, workdir: Path) -> None:
    """Trains the tokenizer where the config says so, and tokenises both splits."""
    tokenizer = make_tokenizer(data, source.train)
    tokenizer.save(workdir / "tokenizer")
    save_tokens(source.train, tokenizer, workdir / "data" / "train.npy")
    save_tokens(source.validation, tokenizer, workdir / "data" / "validation.npy")
    facts = {"source": source.name, "fingerprint": fingerprint_of(source, tokenizer)}
    write_whole(workdir / FINGERPRINT_FILE, json.dumps(facts, indent=2).encode())


def save_tokens(documents: Sequence[str], tokenizer: Tokenizer, path: Path) -> None:
    """Writes the documents' tokens, each document closed by `end_of_text`."""
    end = np.array([tokenizer.end_of_text])
    parts = [part for tokens in tokenizer.encode(documents) for part in (tokens, end)]
    dtype = np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32
    content = io.BytesIO()
    np.save(content, np.concatenate([end[:0], *parts]).astype(dtype))
    write_whole(path, content.getvalue())


def load_prepared(workdir: Path) -> Corpus:
    """The corpus that a run left in its workdir; the data itself is not needed any more.

    Raises:
      InputError: if no run prepared it.
    """
    tokenizer = load_tokenizer(workdir / "tokenizer")
    described = workdir / FINGERPRINT_FILE
    if tokenizer is None or not described.exists():
        raise InputError(f"workdir {workdir} holds no prepared data; train there first")
    facts = json.loads(described.read_text())
    return Corpus(
        name=facts["source"],
        tokenizer=tokenizer,
        train=np.load(workdir / "data" / "train.npy", mmap_mode="r"),
        validation=np.load(workdir / "data" / "validation.npy", mmap_mode="r"),
        fingerprint=facts["fingerprint"],
    )


def fingerprint_of(source: Source, tokenizer: Tokenizer) -> str:
    """A hash of all that decides the tokens."""
    return digest([source.fingerprint.encode(), tokenizer.fingerprint.encode()])
