"""Turns documents into token shards, on all cores; resumes if it is killed and restarted."""

import os
import re
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import dataclass
from functools import cached_property
from multiprocessing import get_context
from multiprocessing.sharedctypes import Synchronized

import numpy as np
from jaxtyping import Integer

from t5x_diffeq.data.encoding import PIECE_CHARACTERS, TextEncoder, encoder_of
from t5x_diffeq.data.manifest import MASKS, SPLITS
from t5x_diffeq.data.rows import Skipped
from t5x_diffeq.data.shards import RECORD_TOKENS, merge_shards, read_shard_facts, stem, write_shard
from t5x_diffeq.data.sources import Source
from t5x_diffeq.data.tokenizer import Tokenizer
from t5x_diffeq.data.tokenizer_folder import load_tokenizer
from t5x_diffeq.system.console import Progress, log
from t5x_diffeq.system.errors import InputError, RunError
from t5x_diffeq.system.files import AnyPath, digest

BATCH_CHARACTERS = 4_000_000  # tokenised at once, or more if there are more threads
_Job = tuple[str, int]  # the split and number of a shard
_Report = Callable[[int], None]  # is told how many characters, or documents, are tokenised so far


def prepare_shards(
    source: Source,
    tokenizer: Tokenizer,
    folder: AnyPath,
    shards: int,
    workers: int,
    part: tuple[int, int] = (0, 1),
) -> dict | None:
    """Makes the shards of one part, with the tokenizer that is saved in their folder.

    Shards that are in the folder already are kept. If there is a single part, this then checks all
    shards, and writes and returns the manifest; otherwise it returns None. The same documents and
    tokenizer give the same bytes, whatever the number of workers (processes) or parts. `shards` is
    the number of shards of each split; `part` is (i, n), part i of n, counted from 0.

    Raises:
      InputError: if the folder holds shards of other data, or another number of them, or there is
        nothing to train on.
      RunError: if a shard can't be written.
    """
    facts = {
        "source": source.name,
        "fingerprint": fingerprint_of(source, tokenizer),
        "tokenizer": tokenizer.fingerprint,
        "vocab_size": tokenizer.vocab_size,
        "record_tokens": RECORD_TOKENS,
        **({MASKS: True} if source.conversations else {}),
    }
    _check_count(folder, shards)
    mine = [(split, n) for split in SPLITS for n in range(shards)][part[0] :: part[1]]
    missing = [(s, n) for s, n in mine if not _is_made(folder, stem(s, n, shards), facts)]
    if len(missing) < len(mine):
        log(f"{source.name}: {len(mine) - len(missing)} of {len(mine)} shards are there already")
    full = [job for job in missing if job[0] == "train" and _documents_of(source, job, shards)]
    # More workers than full shards would idle; the threads of one worker share a long document.
    _make_shards(source, folder, shards, missing, facts, min(workers, len(full) or 1))
    if part[1] > 1:
        log("this part is complete; when all parts are, run the command without --shard to finish")
        return None
    manifest = merge_shards(folder, shards, facts, source.max_unreadable, source.is_sample)
    if manifest["skipped"]:
        log(f"{source.name}: skipped documents: {Skipped(manifest['skipped'])}")
    return manifest


def _check_count(folder: AnyPath, shards: int) -> None:
    """Raises an InputError if the folder's splits were divided into another number of shards."""
    shard = re.compile(rf"({'|'.join(SPLITS)})-\d{{5}}-of-(\d{{5}})")
    for path in sorted(folder.glob("*-of-*.json")):
        match = shard.fullmatch(path.stem)
        if match and int(match[2]) != shards:
            raise InputError(
                f"{folder} holds {match[0]}, one of {int(match[2])} shards, and {shards} are to be "
                f"made; keep that number (--shards={int(match[2])}), name another folder, or "
                "delete this one"
            )


def fingerprint_of(source: Source, tokenizer: Tokenizer) -> str:
    """A hash of everything that determines the tokens."""
    encoder = encoder_of(tokenizer, source.conversations)
    return digest([source.fingerprint.encode(), encoder.fingerprint.encode()])


def _is_made(folder: AnyPath, name: str, facts: dict) -> bool:
    stored = read_shard_facts(folder, name)
    if stored and stored["fingerprint"] != facts["fingerprint"]:
        raise InputError(
            f"{folder} holds shard {name} of {stored['source']}, not of {facts['source']} as it is "
            "now; choose another folder, or delete this one"
        )
    return stored is not None


def _make_shards(
    source: Source, folder: AnyPath, shards: int, missing: list[_Job], facts: dict, workers: int
) -> None:
    total, unit = sum(len(_documents_of(source, job, shards)) for job in missing), "documents"
    if source.characters:
        share = total / max(1, len(source.train) + len(source.validation))
        total, unit = round(share * source.characters), "characters"
    context = get_context("spawn")  # a fork of a process with threads may hang
    done, threads = context.Value("q", 0), max(1, (os.cpu_count() or 1) // workers)
    worker = _Worker(source, folder, shards, facts, done, threads)
    with Progress(f"tokenising {source.name}", total, unit) as progress:
        if workers == 1:
            for job in missing:
                worker.make(job, progress.update)
            return
        with ProcessPoolExecutor(workers, context, _start_worker, (worker,)) as pool:
            pending = {pool.submit(_run_job, job) for job in missing}
            while pending:
                finished, pending = wait(pending, timeout=0.5, return_when=FIRST_COMPLETED)
                progress.update(done.value)
                for error in (future.exception() for future in finished):
                    if error:
                        pool.shutdown(wait=False, cancel_futures=True)  # shards in work continue
                    if isinstance(error, RunError | InputError):
                        raise error
                    if error:
                        raise RunError(
                            f"a worker failed: {type(error).__name__}: {error}; the finished "
                            "shards are kept: run again, with fewer --workers if memory ran out"
                        ) from error


@dataclass
class _Worker:
    """Makes shards, one after the other; each process has one worker.

    `done` is the number of characters that all workers have tokenised so far, or of documents if
    the source doesn't know its number of characters.
    """

    source: Source
    folder: AnyPath
    shards: int
    facts: dict
    done: Synchronized
    threads: int

    @cached_property
    def encoder(self) -> TextEncoder:
        tokenizer = load_tokenizer(self.folder / "tokenizer")
        assert tokenizer is not None  # the caller of `prepare_shards` has saved it
        assert fingerprint_of(self.source, tokenizer) == self.facts["fingerprint"]
        tokenizer.threads = self.threads
        return encoder_of(tokenizer, self.source.conversations)

    def make(self, job: _Job, report: _Report = lambda _: None) -> None:
        """Tokenises and writes one shard; calls `report` with what is done.

        If this fails because a file of the source has changed, the error says so.
        """
        skipped = Skipped()

        def count(pieces: list[tuple]) -> None:
            in_characters = self.source.characters > 0
            amount = sum(len(piece) if in_characters else is_last for piece, is_last in pieces)
            with self.done.get_lock():
                self.done.value += amount
            report(self.done.value)

        codes = tokenise_documents(self._take(job, skipped), self.encoder, skipped, count)
        try:
            write_shard(self.folder, stem(*job, self.shards), codes, self.facts, skipped)
        except Exception:
            self.source.check_unchanged()
            raise

    def _take(self, job: _Job, skipped: Skipped) -> Iterator[str]:
        """Yields the shard's documents, and then checks that their files are unchanged."""
        for rows, number in enumerate(_documents_of(self.source, job, self.shards), 1):
            yield getattr(self.source, job[0])[number]
            skipped.check_so_far(rows, self.source.max_unreadable)
        self.source.check_unchanged()


_WORKER: _Worker  # this process's worker


def _start_worker(worker: _Worker) -> None:
    global _WORKER
    _WORKER = worker


def _run_job(job: _Job) -> None:
    _WORKER.make(job)


def _documents_of(source: Source, job: _Job, shards: int) -> range:
    split, n = job
    count = len(getattr(source, split))
    return range(count * n // shards, count * (n + 1) // shards)


def tokenise_documents(
    documents: Iterable[str],
    encoder: TextEncoder,
    skipped: Skipped,
    count: Callable[[list[tuple]], None] = lambda pieces: None,
) -> Iterator[Integer[np.ndarray, " length"]]:
    """The codes of each document with `end_of_text`, in the dtype of the files.

    Documents that can't be trained on are counted in `skipped`, by reason. `count` gets the pieces
    that are done, each with whether it is the last piece of its document.
    """
    characters = max(BATCH_CHARACTERS, 2 * PIECE_CHARACTERS * encoder.tokenizer.threads)
    end, parts = np.array([encoder.end_of_text], encoder.dtype), []
    for batch in _batches(encoder.cut(documents, skipped), characters):
        encoded = encoder.encode([piece for piece, _ in batch])
        count(batch)
        for codes, (_, is_last) in zip(encoded, batch, strict=True):
            parts.append(codes.astype(encoder.dtype))
            if is_last:
                yield np.concatenate([*parts, end])
                parts = []


def _batches(pieces: Iterable[tuple], most: int) -> Iterator[list[tuple]]:
    """The pieces in lists, which end once they have `most` characters."""
    batch, characters = [], 0
    for piece in pieces:
        batch.append(piece)
        characters += len(piece[0])
        if characters >= most:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch
