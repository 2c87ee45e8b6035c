"""Tokenising in the loop: each row of the global batch reads its own documents, when it needs them.

Row r of B rows reads documents r, r + B, r + 2B, ... of an endless order, in which each epoch has
every document once, newly shuffled. It concatenates them and cuts them into windows like
`packing.Windows`. So a row depends only on the seed and on B, whatever the number of processes, and
its position is two integers: which of its documents, and how many tokens of that document are
consumed.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from itertools import count
from operator import itemgetter

import jax
import numpy as np
from jax.experimental.multihost_utils import process_allgather
from jaxtyping import Integer

from t5x_diffeq.data.documents import Documents
from t5x_diffeq.data.encoding import PIECE_CHARACTERS, Encoder, Piece
from t5x_diffeq.data.packing import Example, example_of
from t5x_diffeq.data.preparation import group_pieces
from t5x_diffeq.data.shards import format_reasons
from t5x_diffeq.runtime.console import say
from t5x_diffeq.runtime.errors import InputError

BLOCK_TOKENS = 2**19  # made at once (at least a batch): enough for all cores, soon ready
_CHARACTERS_PER_TOKEN = 4  # a guess: if too low, a row asks again; if too high, it reads ahead
_LIVE_EPOCHS = 3  # near an epoch's end rows are in two; one may lag in a long document
StreamPositions = Integer[np.ndarray, "positions 2"]


class RowStreams:
    """The documents as endless rows of tokens.

    Args:
      documents: the texts.
      encoder: makes codes of them.
      length: L, tokens in a window.
      batch_size: B, rows in the global batch.
      seed: shuffles the documents.
      cross_documents: whether attention crosses documents; else windows have segments.

    Raises:
      InputError: if there are fewer documents than rows, or none can be trained on.
    """

    def __init__(
        self,
        documents: Documents,
        encoder: Encoder,
        length: int,
        batch_size: int,
        seed: int,
        cross_documents: bool = False,
    ):
        self.documents, self.encoder, self.length = documents, encoder, length
        self.batch_size, self.seed, self.cross_documents = batch_size, seed, cross_documents
        self.skipped, self.said = Counter[str](), 0
        if len(documents) < batch_size:
            raise InputError(
                f"data.tokenize=in_loop gives each of the {batch_size} rows of a batch documents "
                f"of its own, and there are {len(documents)}; set data.tokenize=ahead"
            )
        skipped = Counter[str]()
        if next(encoder.cut(documents, skipped), None) is None:  # the first one usually ends this
            reasons = format_reasons(skipped)
            raise InputError(f"data.source has no document to train on: {reasons}; give text")

    def batches(
        self, rows: Integer[np.ndarray, " rows"], step: int, positions: Sequence | None
    ) -> Iterator[tuple[Example, StreamPositions]]:
        """The batches after `step`, each with the positions after it; a thread reads ahead.

        Args:
          rows: the numbers of this process's rows.
          step: the step of the checkpoint, or 0.
          positions: `[B, 2]`, from the checkpoint.

        Yields:
          The rows' windows; and the positions `[B, 2]`, -1 for other processes' rows.

        Raises:
          InputError: if the checkpoint holds no such positions.
        """
        first = self._initial_positions(step, positions)
        own = [
            StreamRow(self.pieces(r, int(first[r, 0])), *first[r].tolist()) for r in rows.tolist()
        ]
        with ThreadPoolExecutor(1) as thread:
            block = thread.submit(self.block, rows, own)
            while True:
                ready = block.result()
                block = thread.submit(self.block, rows, own)
                yield from ready

    def _initial_positions(self, step: int, positions: Sequence | None) -> StreamPositions:
        """The positions to start from: those of a checkpoint, or the initial ones."""
        if step == 0:
            return np.zeros((self.batch_size, 2), np.int64)
        found = np.array([] if positions is None else positions, np.int64)
        if found.shape != (self.batch_size, 2) or found.min() < 0:
            raise InputError(
                f"checkpoint {step} does not say where the {self.batch_size} rows stand in their "
                "documents, which data.tokenize=in_loop needs; choose a new --workdir"
            )
        return found

    def pieces(self, row: int, first: int) -> Iterator[tuple[int, Piece, bool]]:
        """Pieces of the row's documents from `first` on: document, piece, and if it is the last."""
        for number in count(first):
            index = row + number * self.batch_size
            text = self.documents[document_at(len(self.documents), self.seed, index)]
            for piece, is_last in self.encoder.cut([text], self.skipped):
                yield number, piece, is_last

    def block(
        self, rows: Integer[np.ndarray, " rows"], own: list["StreamRow"]
    ) -> list[tuple[Example, StreamPositions]]:
        """The next batches of these rows, each with the positions after it; updates `own`."""
        steps = max(1, BLOCK_TOKENS // (len(own) * self.length))
        self._fill(own, steps * self.length + 1)
        taken = [row.take(steps, self.length) for row in own]
        positions = np.full((steps, self.batch_size, 2), -1, np.int64)
        positions[:, rows] = np.stack([position for _, position in taken], axis=1)
        self._report_skipped()
        example = self._windows(np.stack([tokens for tokens, _ in taken]))
        return [(jax.tree.map(itemgetter(s), example), positions[s]) for s in range(steps)]

    def _fill(self, own: list["StreamRow"], tokens: int) -> None:
        """Tokenises documents until each row holds this many tokens."""
        end = np.array([self.encoder.end_of_text], np.int32)
        while lacking := [row for row in own if row.available < tokens]:
            wanted = (piece for row in lacking for piece in row.next_pieces(tokens))
            for batch in group_pieces(wanted):
                encoded = _encode_evenly(self.encoder, [piece for piece, *_ in batch])
                for found, (_, is_last, number, row) in zip(encoded, batch, strict=True):
                    row.add(number, np.concatenate([found, end]) if is_last else found)

    def _windows(self, codes: Integer[np.ndarray, "rows codes"]) -> Example:
        """Rows of s L + 1 codes as examples `[s, rows, L]`."""

        def by_step(row: Integer[np.ndarray, "rows codes"]) -> Integer[np.ndarray, "s rows L"]:
            return np.ascontiguousarray(row.reshape(len(row), -1, self.length).swapaxes(0, 1))

        end = None if self.cross_documents else self.encoder.end_of_text
        return example_of(by_step(codes[:, :-1]), by_step(codes[:, 1:]), end)

    def _report_skipped(self) -> None:
        """Prints how many documents these rows skipped, whenever the number has doubled."""
        if self.skipped.total() >= max(1, 2 * self.said):
            self.said = self.skipped.total()
            say(f"documents skipped so far: {format_reasons(self.skipped)}")


class StreamRow:
    """The tokens that a row holds, from the start of the next window, and their documents.

    Args:
      pieces: pieces of the row's documents: document, piece, and whether it is its last.
      number: the document of the first piece.
      consumed: tokens of that document that are no longer held.

    Attributes:
      numbers: the numbers of the documents whose tokens are held.
      starts: where each starts, relative to the first token held; <= 0 for the first.
      available: number of tokens held; negative while consumed tokens are tokenised again.
    """

    def __init__(self, pieces: Iterator[tuple[int, Piece, bool]], number: int, consumed: int):
        self.pieces, self.numbers, self.starts = pieces, [number], [-consumed]
        self.tokens: list[np.ndarray] = []
        self.available = -consumed

    def next_pieces(self, tokens: int) -> Iterator[tuple[Piece, bool, int, "StreamRow"]]:
        """The next pieces, about as many as are needed to hold this many tokens."""
        missing = min((tokens - self.available) * _CHARACTERS_PER_TOKEN, PIECE_CHARACTERS)
        while missing > 0:
            number, piece, is_last = next(self.pieces)
            yield piece, is_last, number, self
            missing -= len(piece)

    def add(self, number: int, tokens: Integer[np.ndarray, " tokens"]) -> None:
        """Adds a piece of document `number`, except for what was already consumed."""
        if number != self.numbers[-1]:
            self.numbers.append(number)
            self.starts.append(self.available)
        self.tokens.append(tokens[max(0, -self.available) :])
        self.available += len(tokens)

    def take(
        self, steps: int, length: int
    ) -> tuple[Integer[np.ndarray, " tokens"], StreamPositions]:
        """Consumes the tokens of this many windows; returns them and the position after each."""
        tokens, consumed = np.concatenate(self.tokens), steps * length
        numbers, starts = np.array(self.numbers), np.array(self.starts)
        after = length * np.arange(1, steps + 1)
        at = np.searchsorted(starts, after, side="right") - 1
        positions = np.stack([numbers[at], after - starts[at]], axis=1)
        self.numbers = numbers[at[-1] :].tolist()
        self.starts = (starts[at[-1] :] - consumed).tolist()
        self.tokens, self.available = [tokens[consumed:]], self.available - consumed
        return tokens[: consumed + 1], positions


def _encode_evenly(encoder: Encoder, pieces: list[Piece]) -> list[Integer[np.ndarray, " length"]]:
    """The codes of each piece; starts with long ones, so that all cores finish together."""
    order = sorted(range(len(pieces)), key=lambda n: -len(pieces[n]))
    encoded = encoder.encode([pieces[n] for n in order])
    return [codes for _, codes in sorted(zip(order, encoded, strict=True), key=itemgetter(0))]


def document_at(documents: int, seed: int, index: int) -> int:
    """The number of the document at an index of the endless order."""
    epoch, within = divmod(index, documents)
    return int(_order_of(documents, seed, epoch)[within])


@lru_cache(_LIVE_EPOCHS)
def _order_of(documents: int, seed: int, epoch: int) -> Integer[np.ndarray, " documents"]:
    """The order of an epoch, in the smallest dtype: it is all that shuffling keeps in memory."""
    numbers = np.arange(documents, dtype=np.min_scalar_type(documents))
    return np.random.default_rng([seed, epoch]).permutation(numbers)


def gather_positions(positions: StreamPositions | None) -> list | None:
    """The positions of all processes' rows, for a checkpoint; every process must call it."""
    if positions is None:
        return None
    words = process_allgather(positions.view(np.int32))  # JAX doesn't gather 64-bit integers
    return words.view(np.int64).max(axis=0).tolist()
