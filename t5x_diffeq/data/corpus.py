"""The data of a workdir: tokenised once, or read from shards, and checked on every run.

With data.tokenize=in_loop, only the validation split is tokenised, and the train split stays text.
"""

import json
import os
from dataclasses import dataclass, replace
from functools import cached_property

from t5x_diffeq.data.documents import Documents
from t5x_diffeq.data.manifest import MANIFEST, MASKS, SPLITS, damage_error, read_manifest
from t5x_diffeq.data.mixture import ConcatenatedDocuments, part_configs
from t5x_diffeq.data.preparation import fingerprint_of, prepare_shards
from t5x_diffeq.data.recipe import (
    discard_other_tokenizer,
    fingerprints,
    put_tokenizer,
    tokenizer_in,
)
from t5x_diffeq.data.shards import ShardedDocuments, read_shard_facts
from t5x_diffeq.data.sources import Source, load_source
from t5x_diffeq.data.token_bytes import NoByteLengthsError, TokenBytes, token_bytes
from t5x_diffeq.data.tokenizer import Tokenizer, load_tokenizer
from t5x_diffeq.runtime.config import DataKeys, check_vocab_size
from t5x_diffeq.runtime.console import format_count, say
from t5x_diffeq.runtime.errors import InputError
from t5x_diffeq.runtime.files import (
    AnyPath,
    absolute_path,
    digest,
    join_path,
    parse_path,
    remove_folder,
    write_whole,
)

_CONFIG_FILE, _FACTS_FILE = "config.json", "data.json"
_SHARDS_OF_LARGE = 64  # per split; a source tokenised by one process has one


@dataclass(frozen=True)
class CorpusPart:
    """Both splits of a source as tokenised documents, each closed by `end_of_text`.

    Attributes:
      name: the name of the source.
      weight: its share of the examples, relative to the other parts' weights.
      train: documents; texts if they are tokenised in the loop, or none if nothing trains.
      validation: documents.
      fingerprint: a hash of everything that determines the tokens.
    """

    name: str
    weight: float
    train: Documents | ShardedDocuments
    validation: ShardedDocuments
    fingerprint: str


@dataclass(frozen=True)
class Corpus:
    """The parts of a mixture (just one for a single source) and their common tokenizer."""

    tokenizer: Tokenizer
    parts: tuple[CorpusPart, ...]

    @property
    def name(self) -> str:
        """The names of the sources, with their weights if there are several."""
        if len(self.parts) == 1:
            return self.parts[0].name
        return ", ".join(f"{part.weight:g} x {part.name}" for part in self.parts)

    @property
    def fingerprint(self) -> str:
        """A hash of everything that determines the examples."""
        weights = [str(part.weight) for part in self.parts] if len(self.parts) > 1 else []
        return digest(x.encode() for x in [*(part.fingerprint for part in self.parts), *weights])

    @cached_property
    def token_bytes(self) -> TokenBytes | None:
        """The bytes that each token stands for; None, with a line that says why, if unknown."""
        try:
            return token_bytes(self.tokenizer)
        except NoByteLengthsError as error:
            say(f"bits per byte is left out: {error}")
            return None

    def amount(self, split: str) -> str:
        """The size of all parts: `1.23M tokens`, or `12.3k documents` for texts."""
        documents = [getattr(part, split) for part in self.parts]
        sharded = [each for each in documents if isinstance(each, ShardedDocuments)]
        if len(sharded) == len(documents):
            tokens = sum(int(each.lengths.sum()) for each in sharded)
            trained = sum(each.trained_tokens for each in sharded)
            note = f" ({format_count(trained)} with a loss)" if trained < tokens else ""
            return f"{format_count(tokens)} tokens{note}"
        return f"{format_count(sum(map(len, documents)))} documents"


def prepare_corpus(
    data: DataKeys, workdir: AnyPath, new: bool, vocab_size: int | None = None
) -> Corpus:
    """The corpus of a run.

    Args:
      data: `config.data`.
      workdir: stores the tokenizer, the tokens (or where their shards are) and the fingerprint.
      new: make all of these; else they must exist, and the data must be unchanged.
      vocab_size: the vocabulary size that the tokenizer must have; None: any.

    Raises:
      InputError: if the data can't be used, or isn't what the workdir was started with.
      RunError: if the workdir can't be written to.
    """
    configs = part_configs(data)
    sources = [None if part.source == "tokens" else load_source(part) for part in configs]
    in_loop = sources[0] if data.tokenize == "in_loop" else None
    if in_loop:
        _check_one_by_one(in_loop)
    if new:
        _make_corpus(data, configs, sources, workdir, vocab_size)
    corpus = load_corpus(workdir)
    if data.loss_on == "completion":
        _say_trained(corpus)
    for config, source, part in zip(configs, sources, corpus.parts, strict=True):
        if source is None:
            folder = _shard_folder(config)
            name, fingerprint = str(folder), _fingerprint_of_shards(_read_shards(folder))
        else:
            name, fingerprint = source.name, fingerprint_of(source, corpus.tokenizer)
        if part.fingerprint != fingerprint:
            raise InputError(
                f"workdir {workdir} was started on {part.name} (fingerprint "
                f"{part.fingerprint[:12]}), but the data is now {name} ({fingerprint[:12]}); "
                "restore that data or choose a new --workdir"
            )
    if in_loop:
        return replace(corpus, parts=(replace(corpus.parts[0], train=in_loop.train),))
    return corpus


def _say_trained(corpus: Corpus) -> None:
    """Prints how many tokens have a loss, and where the chat template comes from."""
    chat = corpus.tokenizer.chat
    splits = [
        f"{split}: {format_count(len(documents))} conversations, "
        f"{format_count(documents.trained_tokens)} of {format_count(int(documents.lengths.sum()))} "
        "tokens have a loss"
        for part in corpus.parts
        for split, documents in (("train", part.train), ("validation", part.validation))
        if isinstance(documents, ShardedDocuments)
    ]
    template = chat.origin if chat.template is not None else "none"
    say("data.loss_on=completion", *(f"  {line}" for line in splits), f"  template: {template}")


def _check_one_by_one(source: Source) -> None:
    """Checks that the source's documents can be read in any order."""
    if not source.one_by_one:
        raise InputError(
            f"data.tokenize=in_loop reads documents in random order, and those of {source.name} "
            "lie in several large pieces (parquet row groups, compressed files) that are read "
            "whole; set data.tokenize=ahead, or give .jsonl files as they are"
        )


def _make_corpus(
    data: DataKeys,
    configs: list[DataKeys],
    sources: list[Source | None],
    workdir: AnyPath,
    vocab_size: int | None,
) -> None:
    """Makes the tokenizer, unless shards come with one, and tokenises what isn't in shards."""
    folders = [
        _shard_folder(c) if s is None else None for c, s in zip(configs, sources, strict=True)
    ]
    given = [_tokenizer_of_shards(folder) for folder in folders if folder]
    if given and data.chat_template is not None:
        raise InputError(
            f"data.chat_template={data.chat_template}: prepare_data has already written the "
            "conversations of data.source=tokens with a template; leave it out"
        )
    documents = ConcatenatedDocuments([source.train for source in sources if source])
    if given:
        tokenizer = given[0]
        if any(fingerprints(other) != fingerprints(tokenizer) for other in given):
            raise InputError(
                "data.mixture: its shards were made with different tokenizers; prepare them with "
                "the same one (--config.data.tokenizer=FILE)"
            )
        there = load_tokenizer(workdir / "tokenizer")
        same = there is not None and there.fingerprint == tokenizer.fingerprint
        if there and same and tokenizer.chat.template is None:
            tokenizer.chat = there.chat  # of the run in init_from, which can have a template
        put_tokenizer(tokenizer, workdir / "tokenizer")
    else:
        text = digest(source.fingerprint.encode() for source in sources if source)
        discard_other_tokenizer(workdir / "tokenizer", data, text)
        tokenizer = tokenizer_in(workdir / "tokenizer", data, documents, text)
    check_vocab_size(vocab_size, tokenizer.vocab_size)
    weights = [entry[0] for entry in data.mixture] or [1]
    splits = ("validation",) if data.tokenize == "in_loop" else SPLITS
    parts = []
    for number, (source, folder) in enumerate(zip(sources, folders, strict=True)):
        made = f"data/{number}"
        if folder:
            manifest = _read_shards(folder)
            _check_masks(folder, manifest, data.loss_on)
        else:
            assert source  # a part without shards has documents
            manifest = _tokenise(source, tokenizer, workdir / made, splits)
        fingerprint = _fingerprint_of_shards(manifest) if folder else manifest["fingerprint"]
        parts.append(
            {
                "source": manifest["source"],
                "weight": weights[number],
                "fingerprint": fingerprint,
                "shards": str(folder or made),
            }
        )
    write_whole(workdir / _FACTS_FILE, json.dumps({"parts": parts}, indent=2).encode())


def _tokenise(
    source: Source, tokenizer: Tokenizer, folder: AnyPath, splits: tuple[str, ...]
) -> dict:
    _discard_other_shards(folder, fingerprint_of(source, tokenizer))
    tokenizer.save(folder / "tokenizer")
    shards, workers = (_SHARDS_OF_LARGE, os.cpu_count() or 1) if source.large else (1, 1)
    manifest = prepare_shards(source, tokenizer, folder, shards, workers, splits=splits)
    assert manifest is not None  # all shards were made here, so there is one
    return manifest


def _discard_other_shards(folder: AnyPath, fingerprint: str) -> None:
    """Removes tokens left by a refused run, if they are from other data."""
    facts = (
        read_shard_facts(folder, path.name.removesuffix(".json")) for path in folder.glob("*.json")
    )
    if any(found and found["fingerprint"] != fingerprint for found in facts):
        say(f"{folder} is left of a run that never started, on other data; it is made again")
        remove_folder(folder)


def _shard_folder(data: DataKeys) -> AnyPath:
    """The folder that `prepare_data` made."""
    if not data.path:
        raise InputError(
            "data.path is not set; data.source=tokens needs --config.data.path=DIR, a folder that "
            "`python -m t5x_diffeq.prepare_data` made"
        )
    return absolute_path(parse_path(data.path, "data.path"))


def _read_shards(folder: AnyPath) -> dict:
    manifest = read_manifest(folder)
    for split in SPLITS:
        if split not in manifest:
            raise InputError(damage_error(folder, f"it has no {split}"))
    return manifest


def _check_masks(folder: AnyPath, manifest: dict, loss_on: str) -> None:
    """Checks that shards say which tokens are trained on where the config asks for it."""
    made_with = "completion" if manifest.get(MASKS) else "all"
    if made_with != loss_on:
        raise InputError(
            f"data.loss_on={loss_on}: the shards in data.path={folder} were prepared with "
            f"data.loss_on={made_with}; set that, or prepare them again"
        )


def _tokenizer_of_shards(folder: AnyPath) -> Tokenizer:
    manifest = _read_shards(folder)
    tokenizer = load_tokenizer(folder / "tokenizer")
    if tokenizer is None or tokenizer.fingerprint != manifest["tokenizer"]:
        raise InputError(
            f"data.path={folder}: its tokenizer is not the one that its shards were made with; "
            "prepare them again"
        )
    return tokenizer


def check_tokenizers(data: DataKeys, tokenizer: Tokenizer) -> None:
    """Checks that any shards in the data were made with this tokenizer.

    Raises:
      InputError: if some weren't; names them.
    """
    for part in part_configs(data):
        if part.source != "tokens":
            continue
        folder = _shard_folder(part)
        if _tokenizer_of_shards(folder).fingerprint != tokenizer.fingerprint:
            raise InputError(
                f"data.path={folder}: its shards were made with another tokenizer than the run in "
                "init_from has; give the documents themselves, or prepare them with that tokenizer"
            )


def load_corpus(workdir: AnyPath) -> Corpus:
    """The corpus that a run left in its workdir; of the data itself, only shards are needed.

    Raises:
      InputError: if no run prepared it, or it can no longer be read.
    """
    tokenizer = load_tokenizer(workdir / "tokenizer")
    if tokenizer is None and (workdir / _FACTS_FILE).exists():
        raise InputError(f"workdir {workdir} has lost its tokenizer/; train in a new one")
    try:
        facts = json.loads((workdir / _FACTS_FILE).read_text())["parts"]
        assert tokenizer is not None  # else FACTS_FILE doesn't exist either
        parts = tuple(_load_part(workdir, part, tokenizer) for part in facts)
    except InputError:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        if not (workdir / _FACTS_FILE).exists():
            if not (workdir / _CONFIG_FILE).exists():
                raise InputError(f"workdir {workdir} holds no run; train there first") from error
            raise InputError(
                f"workdir {workdir} has lost {_FACTS_FILE}, which says where its tokens are; "
                "restore it or train in a new --workdir"
            ) from error
        raise InputError(
            f"{workdir / _FACTS_FILE} can't be read: {type(error).__name__}: {error}; restore it "
            "or train in a new --workdir"
        ) from error
    return Corpus(tokenizer, parts)


def link_corpus(source: AnyPath, workdir: AnyPath) -> None:
    """Makes the corpus of one workdir that of another one, too; its tokens stay where they are."""
    facts = json.loads((source / _FACTS_FILE).read_text())
    for part in facts["parts"]:
        part["shards"] = str(absolute_path(join_path(source, part["shards"])))
    write_whole(workdir / _FACTS_FILE, json.dumps(facts, indent=2).encode())


def _load_part(workdir: AnyPath, facts: dict, tokenizer: Tokenizer) -> CorpusPart:
    folder = join_path(workdir, facts["shards"])
    if folder.is_relative_to(workdir) and not (folder / MANIFEST).exists():
        raise InputError(
            f"workdir {workdir} has lost its tokens in {facts['shards']}/; restore them or train "
            "in a new --workdir"
        )
    manifest = read_manifest(folder)
    wanted = {"tokenizer": tokenizer.fingerprint, "vocab_size": tokenizer.vocab_size}
    for key, value in wanted.items():
        if manifest[key] != value:
            raise InputError(
                f"{folder} was tokenised with {key} {manifest[key]!r}, and the tokenizer of "
                f"workdir {workdir} has {value!r}; restore the one or the other"
            )
    train = ShardedDocuments(folder, "train") if "train" in manifest else ()
    validation = ShardedDocuments(folder, "validation")
    return CorpusPart(facts["source"], facts["weight"], train, validation, facts["fingerprint"])


def _fingerprint_of_shards(manifest: dict) -> str:
    return digest([hash.encode() for split in SPLITS for hash in manifest[split]["sha256"]])
