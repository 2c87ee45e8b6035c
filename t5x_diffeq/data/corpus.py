"""The data of a workdir: tokenised once, or read from shards, and checked on every run."""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cached_property

from t5x_diffeq.config.config import CONFIG_FILE, DataKeys, check_vocab_size, is_run
from t5x_diffeq.data.documents import ConcatenatedDocuments
from t5x_diffeq.data.manifest import MANIFEST, MASKS, SPLITS, read_manifest
from t5x_diffeq.data.named_source import load_source, part_configs
from t5x_diffeq.data.preparation import fingerprint_of, prepare_shards
from t5x_diffeq.data.recipe import TRAINED, make_tokenizer, tokenizer_in, whole_fingerprint
from t5x_diffeq.data.shards import ShardedDocuments, read_shard_facts
from t5x_diffeq.data.sources import STREAM, Source
from t5x_diffeq.data.token_bytes import NoByteLengthsError, TokenBytes, token_bytes
from t5x_diffeq.data.tokenizer import Tokenizer
from t5x_diffeq.data.tokenizer_folder import load_tokenizer
from t5x_diffeq.system import files
from t5x_diffeq.system.console import format_count, log
from t5x_diffeq.system.errors import InputError
from t5x_diffeq.system.files import AnyPath
from t5x_diffeq.system.foreign_files import check_inside, read_inside
from t5x_diffeq.system.json_lines import NUMBER, check_types

_FACTS_FILE = "data.json"
_PART = {"source": (str,), "weight": NUMBER, "fingerprint": (str,), "shards": (str,)}
_SHARDS_OF_LARGE = 64  # per split; a source tokenised by one process has one


@dataclass(frozen=True)
class CorpusPart:
    """Both splits of a source as tokenised documents, each closed by `end_of_text`.

    `weight` is its share of the examples, relative to the other parts' weights.
    """

    name: str
    weight: float
    train: ShardedDocuments
    validation: ShardedDocuments
    fingerprint: str


class LostTokensError(InputError):
    """The tokens of a run aren't where it left or read them."""


@dataclass(frozen=True)
class Corpus:
    """The parts of a mixture (just one for a single source) and their common tokenizer.

    A run that was copied without its tokens can generate, so they are missed when they are read.
    """

    tokenizer: Tokenizer
    parts_or_error: "tuple[CorpusPart, ...] | LostTokensError"

    @property
    def parts(self) -> tuple[CorpusPart, ...]:
        """The parts; an InputError if their tokens aren't there."""
        if isinstance(self.parts_or_error, LostTokensError):
            raise self.parts_or_error
        return self.parts_or_error

    @property
    def name(self) -> str:
        """The names of the sources, with their weights if there are several."""
        if len(self.parts) == 1:
            return self.parts[0].name
        return ", ".join(f"{part.weight:g} x {part.name}" for part in self.parts)

    @property
    def fingerprint(self) -> str:
        """A hash of everything that determines the examples."""
        return _fingerprint_of_parts([(part.fingerprint, part.weight) for part in self.parts])

    @cached_property
    def token_bytes(self) -> TokenBytes | None:
        """The bytes that each token stands for; if unknown, None and a line in the log."""
        try:
            return token_bytes(self.tokenizer)
        except NoByteLengthsError as error:
            log(f"bits per byte is left out: {error}")
            return None

    def opening(self, count: int) -> str:
        """The text of the first `count` tokens of the validation split, in whole characters."""
        tokens = self.parts[0].validation[0][:-1]  # without `end_of_text`
        # The last token can end within a character, which decodes to the replacement character.
        return self.tokenizer.decode(tokens[:count]).rstrip("\ufffd")

    def amount(self, split: str) -> str:
        """The size of all parts: `1.23M tokens`, and how many tokens have a loss, unless all do."""
        documents = [getattr(part, split) for part in self.parts]
        tokens = sum(int(each.lengths.sum()) for each in documents)
        trained = sum(each.trained_tokens for each in documents)
        note = f" ({format_count(trained)} with a loss)" if trained < tokens else ""
        return f"{format_count(tokens)} tokens{note}"


def prepare_corpus(
    data: DataKeys,
    workdir: AnyPath,
    new: bool,
    vocab_size: int | None = None,
    tuned: bool = False,
) -> Corpus:
    """The corpus of a run, whose workdir stores the tokenizer, the tokens and the fingerprint.

    If the run is new, all of these are made, with a vocabulary of `vocab_size` (None: any);
    otherwise they must exist and match the data. The workdir of a `tuned` run has the tokenizer of
    the run that it begins with.

    Raises:
      InputError: if the data is invalid, or isn't what the workdir was started with.
      RunError: if the workdir can't be written to.
    """
    for part in part_configs(data):
        _check_outside(workdir, part)
    origins = [_origin_of(part, data) for part in part_configs(data)]
    if new:
        _make_corpus(data, origins, workdir, vocab_size, tuned)
    else:
        _check_same(data, origins, workdir)
    corpus = load_corpus(workdir)
    assert corpus.parts, "a training reads its tokens"  # so what is lost is said now
    chat = corpus.tokenizer.chat
    if data.loss_on == "completion":
        log(f"chat template: {chat.origin if chat.template is not None else 'none'}")
    return corpus


def _check_outside(workdir: AnyPath, part: DataKeys) -> None:
    """Checks that no folder of text holds the workdir, whose files would be read as text."""
    for key, path in (("path", part.path), ("validation_path", part.validation_path)):
        if part.source not in ("text_files", STREAM) or not path or "://" in path:
            continue
        folder = files.parse_path(path, f"data.{key}")
        if folder.is_dir() and workdir.is_relative_to(folder):
            raise InputError(
                f"workdir {workdir} is in data.{key}={path}, so its files would be read as text; "
                "choose a workdir beside that folder"
            )


def _origin_of(part: DataKeys, data: DataKeys) -> Source | AnyPath:
    """The folder of a part's shards, or its source; an InputError says if it is of a mixture."""
    try:
        return _shard_folder(part) if part.source == "tokens" else load_source(part)
    except InputError as error:
        if part is data:
            raise
        raise InputError(f"data.mixture: {error}") from error


def _check_same(data: DataKeys, origins: list[Source | AnyPath], workdir: AnyPath) -> None:
    """Checks that the data has the contents with which the workdir was started.

    If the data has moved, its new place is written into the workdir's facts.
    """
    tokenizer = load_tokenizer(workdir / "tokenizer")
    try:
        before = files.parse_json(read_inside(workdir / _FACTS_FILE))["parts"]
        weights = [part["weight"] for part in before]
    except (OSError, ValueError, KeyError, TypeError):
        return  # `load_corpus` reports it
    if tokenizer is None:
        return
    if weights != _weights_of(data):
        raise InputError(
            f"workdir {workdir} was started with the weights {weights}, and data.mixture has "
            f"{_weights_of(data)}; restore them or choose a new --workdir"
        )
    parts = []
    for part, origin in zip(before, origins, strict=True):
        is_source = isinstance(origin, Source)
        place, name = ("source", origin.name) if is_source else ("shards", str(origin))
        now = _fingerprint_of(origin, tokenizer)
        if part["fingerprint"] != now:
            raise InputError(
                f"workdir {workdir} was started on {part['source']} (fingerprint "
                f"{part['fingerprint'][:12]}), but the data is now {name} ({now[:12]}); "
                "restore that data or choose a new --workdir"
            )
        parts.append({**part, place: name})
    if parts != before:
        files.write_whole(workdir / _FACTS_FILE, json.dumps({"parts": parts}, indent=2).encode())


def _weights_of(data: DataKeys) -> list[float]:
    return [weight for weight, *_ in data.mixture] or [1]


def _make_corpus(
    data: DataKeys,
    origins: list[Source | AnyPath],
    workdir: AnyPath,
    vocab_size: int | None,
    tuned: bool,
) -> None:
    """Makes the tokenizer, unless shards or a tuned run bring one, and tokenises the sources."""
    sources = [origin for origin in origins if isinstance(origin, Source)]
    tokenizers = [_tokenizer_of_shards(each) for each in origins if not isinstance(each, Source)]
    if tokenizers and data.chat_template is not None:
        raise InputError(
            f"data.chat_template={data.chat_template} doesn't apply to data.source=tokens: "
            "prepare_data has already turned its conversations into tokens; leave the key out"
        )
    if len(set(map(whole_fingerprint, tokenizers))) > 1:
        raise InputError(
            "data.mixture: its shards were made with different tokenizers; prepare them with the "
            "same one (--config.data.tokenizer=FILE)"
        )
    folder = workdir / "tokenizer"
    taken_over = load_tokenizer(folder) if tuned else None
    if tokenizers:
        tokenizer = tokenizers[0]
        if taken_over and taken_over.fingerprint == tokenizer.fingerprint:
            # The tuned run has an opener and stop ids, which the fingerprint doesn't cover.
            if tokenizer.chat.template is not None:
                taken_over.chat = tokenizer.chat  # the shards' conversations are written with it
            tokenizer = taken_over
        tokenizer.save(folder)
    elif taken_over:
        tokenizer = taken_over
    else:
        text = files.digest(source.fingerprint.encode() for source in sources)
        documents = ConcatenatedDocuments([source.train for source in sources])
        tokenizer = tokenizer_in(folder, data, documents, text, discard=True)
    check_vocab_size(vocab_size, tokenizer.vocab_size)
    parts = []
    for number, (origin, weight) in enumerate(zip(origins, _weights_of(data), strict=True)):
        if isinstance(origin, Source):
            shards = f"data/{number}"
            manifest = _tokenise(origin, tokenizer, workdir / shards)
        else:
            shards, manifest = str(origin), read_manifest(origin)
            if (made_with := "completion" if manifest.get(MASKS) else "all") != data.loss_on:
                raise InputError(
                    f"data.loss_on={data.loss_on}: the shards in data.path={origin} were prepared "
                    f"with data.loss_on={made_with}; set that, or prepare them again"
                )
        fingerprint = _fingerprint_of(origin, tokenizer)
        facts = {"source": manifest["source"], "weight": weight, "fingerprint": fingerprint}
        parts.append({**facts, "shards": shards})
    files.write_whole(workdir / _FACTS_FILE, json.dumps({"parts": parts}, indent=2).encode())


def _fingerprint_of(origin: Source | AnyPath, tokenizer: Tokenizer) -> str:
    """A hash of everything that determines the tokens of documents, or of shards in a folder."""
    if isinstance(origin, Source):
        return fingerprint_of(origin, tokenizer)
    manifest = read_manifest(origin)
    hashes = (hash for split in SPLITS for hash in manifest[split]["sha256"])
    return files.digest(map(str.encode, hashes))


def _tokenise(source: Source, tokenizer: Tokenizer, folder: AnyPath) -> dict:
    existing = (read_shard_facts(folder, path.name[:-5]) for path in folder.glob("*.json"))
    fingerprint = fingerprint_of(source, tokenizer)
    if any(facts and facts["fingerprint"] != fingerprint for facts in existing):
        log(f"replacing {folder}: it is left over from a run that never started, on other data")
        files.remove_folder(folder)
    tokenizer.save(folder / "tokenizer")  # from where the workers load it
    shards, workers = (_SHARDS_OF_LARGE, os.cpu_count() or 1) if source.large else (1, 1)
    manifest = prepare_shards(source, tokenizer, folder, shards, workers)
    assert manifest is not None  # all shards were made here, so there is a manifest
    return manifest


def _shard_folder(data: DataKeys) -> AnyPath:
    if not data.path:
        raise InputError(
            "data.path is not set; data.source=tokens needs --config.data.path=DIR, a folder that "
            "`python -m t5x_diffeq.prepare_data` made"
        )
    return files.absolute_path(files.parse_path(data.path, "data.path"))


def _tokenizer_of_shards(folder: AnyPath) -> Tokenizer:
    manifest = read_manifest(folder)
    tokenizer = load_tokenizer(folder / "tokenizer")
    if tokenizer is None or tokenizer.fingerprint != manifest["tokenizer"]:
        raise InputError(
            f"data.path={folder}: its tokenizer is not the one that its shards were made with; "
            "prepare them again"
        )
    return tokenizer


def find_vocab_size(data: DataKeys) -> int:
    """The vocabulary size of the data's tokenizer; the requested size if it is to be trained.

    Raises:
      InputError: if the tokenizer's file, or the manifest of shards, can't be read.
    """
    if shards := [part for part in part_configs(data) if part.source == "tokens"]:
        return read_manifest(_shard_folder(shards[0]))["vocab_size"]
    if data.tokenizer == TRAINED:
        return data.tokenizer_vocab_size
    return make_tokenizer(replace(data, chat_template=None), []).vocab_size


def check_tokenizers(data: DataKeys, tokenizer: Tokenizer) -> None:
    """Raises an InputError if shards in the data were made with another tokenizer."""
    shards = (part for part in part_configs(data) if part.source == "tokens")
    for folder in map(_shard_folder, shards):
        if _tokenizer_of_shards(folder).fingerprint != tokenizer.fingerprint:
            raise InputError(
                f"data.path={folder}: its shards were made with another tokenizer than the run in "
                "init_from has; give the documents themselves, or prepare them with that tokenizer"
            )


def load_corpus(workdir: AnyPath) -> Corpus:
    """The corpus that a run left in its workdir.

    Raises:
      InputError: if there is no run, or what it left can't be read or is another run's.
    """
    facts_file, tokenizer = workdir / _FACTS_FILE, load_tokenizer(workdir / "tokenizer")
    has_config = is_run(workdir) and not is_hugging_face(workdir)
    if not facts_file.exists() and not has_config:
        raise InputError(explain_no_run(workdir))
    if tokenizer is None and facts_file.exists():
        raise InputError(
            f"workdir {workdir} has lost its tokenizer/; restore it, or train in a new one"
        )
    try:
        facts = _read_parts(workdir)
        assert tokenizer is not None  # else the file doesn't exist either
        return Corpus(tokenizer, _load_parts(workdir, facts, tokenizer))
    except OSError as error:
        raise _parts_error(facts_file, error) from error


def _read_parts(workdir: AnyPath) -> list[dict]:
    """The facts about each part of a workdir's corpus.

    Raises:
      OSError: if their file isn't there, or can't be read.
      InputError: if it is damaged.
    """
    path = workdir / _FACTS_FILE
    try:
        facts = files.read_json_object(path)
        check_types(facts, {"parts": (list,)})
        for part in facts["parts"]:
            check_types(part, _PART)
    except ValueError as error:
        raise _parts_error(path, error) from error
    return facts["parts"]


def _parts_error(path: AnyPath, error: Exception) -> InputError:
    return InputError(
        f"{path}, which says where the tokens are, can't be read: {files.describe_error(error)}; "
        "restore it or train in a new --workdir"
    )


def stored_fingerprint(workdir: AnyPath) -> str | None:
    """The fingerprint of the corpus that a run uses; None if the run has not prepared it yet."""
    try:
        parts = _read_parts(workdir)
    except FileNotFoundError:
        return None
    return _fingerprint_of_parts([(part["fingerprint"], part["weight"]) for part in parts])


def _fingerprint_of_parts(parts: Sequence[tuple[str, float]]) -> str:
    weights = [str(weight) for _, weight in parts] if len(parts) > 1 else []
    return files.digest(map(str.encode, (*(fingerprint for fingerprint, _ in parts), *weights)))


def explain_no_run(workdir: AnyPath) -> str:
    """An error message for a workdir without a run; it names runs above, in or beside it."""
    if is_hugging_face(workdir):
        return (
            f"{workdir} is a Hugging Face folder, and no run; make one of it: `python -m "
            f"t5x_diffeq.convert --input={workdir} --workdir=NEW`"
        )
    above = next((each for each in workdir.parents if is_run(each)), None)
    if above and workdir.exists():
        return f"{workdir} is a part of the run {above}; name that workdir"
    where = workdir if workdir.is_dir() else workdir.parent
    names = [path.parent.name for path in sorted(where.glob(f"*/{CONFIG_FILE}"))]
    near = get_close_matches(workdir.name, names, n=1) or names[:3]
    runs = ", ".join(str(where / name) for name in near)
    missing = "" if workdir.exists() else ": there is no such folder"
    if workdir.is_file():
        missing = ": it is a file"
        if workdir.suffix in (".zip", ".tar", ".gz", ".tgz"):
            return f"{workdir} is an archive, and no run; unpack it, and name the run's folder"
    return f"{workdir} holds no run{missing}; name a run's workdir" + (
        f", such as {runs}" if runs else ", or train there first"
    )


def is_hugging_face(folder: AnyPath) -> bool:
    """Whether the `config.json` of a folder is that of a model of transformers."""
    try:
        return "model_type" in files.read_json_object(folder / CONFIG_FILE)
    except (OSError, ValueError, InputError):
        return False


def link_corpus(source: AnyPath, workdir: AnyPath) -> None:
    """Gives a workdir the corpus of the workdir `source`; the tokens stay where they are."""
    parts = _read_parts(source)
    for part in parts:
        part["shards"] = str(files.absolute_path(files.join_path(source, part["shards"])))
    files.write_whole(workdir / _FACTS_FILE, json.dumps({"parts": parts}, indent=2).encode())


def _load_parts(
    workdir: AnyPath, facts: Sequence[dict], tokenizer: Tokenizer
) -> tuple[CorpusPart, ...] | LostTokensError:
    try:
        return tuple(_load_part(workdir, each, tokenizer) for each in facts)
    except LostTokensError as error:
        return error


def _load_part(workdir: AnyPath, facts: dict, tokenizer: Tokenizer) -> CorpusPart:
    folder = files.join_path(workdir, facts["shards"])
    check_inside(folder.resolve())
    if not (folder / MANIFEST).exists():
        raise LostTokensError(
            f"workdir {workdir} has lost its tokens in {facts['shards']}/; restore them or train "
            "in a new --workdir (generating needs none; train finds shards that have moved by "
            "--config.data.path)"
        )
    manifest = read_manifest(folder)
    wanted = {"tokenizer": tokenizer.fingerprint, "vocab_size": tokenizer.vocab_size}
    for key, value in wanted.items():
        if manifest[key] != value:
            raise InputError(
                f"{folder} was tokenised with {key} {manifest[key]!r}, and the tokenizer of "
                f"workdir {workdir} has {value!r}; restore the one or the other"
            )
    named = facts["fingerprint"]  # of a source, or of shards
    if named != manifest["fingerprint"] and named != _fingerprint_of(folder, tokenizer):
        raise InputError(
            f"{folder} holds the tokens of other data than {workdir / _FACTS_FILE} names "
            f"(fingerprints {manifest['fingerprint'][:12]} and {named[:12]}); "
            "restore the one or the other"
        )
    train, validation = (ShardedDocuments(folder, split) for split in SPLITS)
    return CorpusPart(facts["source"], facts["weight"], train, validation, facts["fingerprint"])
