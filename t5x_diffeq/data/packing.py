"""Packs documents into windows of fixed length, with random access to any window.

Each token of a window is predicted from the tokens before it. The first input of a document is the
token that opens it, and the last target is the token that closes it. So every token of a document
is predicted, the first one from the opener alone, and attention need not cross documents.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NotRequired, Protocol, TypedDict, runtime_checkable

import numpy as np
from jaxtyping import Float, Integer

from t5x_diffeq.data.encoding import Codes, is_trained, tokens_of
from t5x_diffeq.data.token_bytes import TokenBytes
from t5x_diffeq.data.tokenizer import Border
from t5x_diffeq.system.errors import InputError

_OPEN_ROWS = 64  # rows that first-fit packing keeps open; they bound its search for room


@runtime_checkable
class TokenDocuments(Protocol):
    """A sequence of tokenised documents, whose lengths are known without reading any.

    They hold codes (see `encoding`): tokens, some of which may be marked as not trained on.
    """

    lengths: np.ndarray

    def slice(self, number: int, start: int, stop: int) -> np.ndarray:
        """Codes `start` to `stop` (or the end) of document `number`; `end_of_text` is its last."""


class Example(TypedDict):
    """The model's inputs, its targets, and the mask of targets that count.

    Each is `[L]`, and `[B, L]` in a batch. `segments` number the documents of a window, and
    `positions` the tokens of each document, from 0; without them, attention crosses documents.
    `bytes`, a number per example (`[B]` in a batch), is the size of the text of the targets that
    count.
    """

    inputs: Integer[np.ndarray, "..."]
    targets: Integer[np.ndarray, "..."]
    mask: Float[np.ndarray, "..."]
    segments: NotRequired[Integer[np.ndarray, "..."]]
    positions: NotRequired[Integer[np.ndarray, "..."]]
    bytes: NotRequired[np.int32 | Integer[np.ndarray, " B"]]


def add_segments(example: Example, starts: np.ndarray) -> Example:
    """The example (of length L, or a batch) with segments and positions.

    `starts`, `[..., L]`, is true where an input opens a document.
    """
    columns = np.arange(starts.shape[-1], dtype=np.int32)
    opened = np.maximum.accumulate(np.where(starts, columns, 0), axis=-1)
    segments = np.cumsum(starts, axis=-1, dtype=np.int32)
    return {**example, "segments": segments, "positions": columns - opened}


def example_of(inputs: Codes, targets: Codes, border: Border, segments: bool) -> Example:
    """The example, or the batch, of codes (see `encoding`); only targets to train on count.

    `inputs` and the `targets` that follow them are `[..., L]`. Where an input would be the token
    that closes a document, the opener of the next document stands instead. Without segments,
    attention crosses documents.
    """
    starts = inputs == border.end
    example: Example = {
        "inputs": np.where(starts, border.opener, tokens_of(inputs)),
        "targets": tokens_of(targets),
        "mask": is_trained(targets).astype(np.float32),
    }
    return add_segments(example, starts) if segments else example


class Windows:
    """Concatenate, then split: window k predicts tokens kL .. kL + L - 1 of the concatenation.

    So each token is predicted once, the very first from an opener, and nothing is padded. Prefix
    sums of the documents' lengths say which documents a window takes tokens from.

    Args:
      length: L.
      border: the tokens between two documents.
      ragged: whether to keep a last, shorter window (padded and masked).
      seed: shuffles the documents; None keeps their order.
      segments: whether examples have segments; without them, attention crosses documents.
      token_bytes: gives examples their `bytes`; None: they have none.

    Raises:
      InputError: if there aren't enough tokens to fill a window.
    """

    def __init__(
        self,
        documents: TokenDocuments,
        length: int,
        split: str,
        border: Border,
        ragged: bool = False,
        seed: int | None = None,
        segments: bool = True,
        token_bytes: TokenBytes | None = None,
    ):
        self.documents, self.length, self.border = documents, length, border
        self.segments, self.token_bytes = segments, token_bytes
        self.order = _shuffle(len(documents.lengths), seed)
        self.ends = np.cumsum(documents.lengths[self.order], dtype=np.int64)
        tokens = int(self.ends[-1]) if len(self.ends) else 0
        self.count = -(-tokens // length) if ragged else tokens // length
        if not tokens:
            keys = "data.path or data.validation_path" if split == "validation" else "data.path"
            raise InputError(
                f"the {split} split has no tokens: its documents are empty or not text; check "
                f"what {keys} names"
            )
        if self.count < 1:
            raise InputError(
                f"data.sequence_length={length} needs {length} tokens, and the {split} split has "
                f"{tokens}; shorten the sequence or give more text"
            )

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, k: int) -> Example:
        batch: Any = self.batch([k])
        example: Any = {name: leaf[0] for name, leaf in batch.items()}
        return example

    def batch(self, numbers: Sequence[int]) -> Example:
        """The windows of these numbers, made together to spread the overhead of NumPy's calls."""
        codes = np.zeros((len(numbers), self.length + 1), np.int32)
        stops = np.empty((len(numbers), 1), np.int64)  # the number of targets in each window
        for row, stop, k in zip(codes, stops, numbers, strict=True):
            before = min(k, 1)
            window = self.codes(k * self.length - before, (k + 1) * self.length)
            row[0] = self.border.end  # stays in the very first window, which nothing precedes
            row[1 - before :][: len(window)] = window
            stop[:] = len(window) - before
        example = example_of(codes[:, :-1], codes[:, 1:], self.border, self.segments)
        example["mask"][np.arange(self.length) >= stops] = 0
        if self.token_bytes is not None:
            counted = example["mask"] > 0
            size = self.token_bytes.count(example["inputs"], example["targets"], counted)
            example["bytes"] = size
        return example

    def codes(self, start: int, stop: int) -> Integer[np.ndarray, " codes"]:
        """Codes `start` to `stop` (or the end) of the concatenated documents."""
        row = np.empty(min(stop, int(self.ends[-1])) - start, np.int32)
        index = int(np.searchsorted(self.ends, start, side="right"))
        filled = 0
        while filled < len(row):
            number = int(self.order[index])
            first = start + filled - int(self.ends[index]) + int(self.documents.lengths[number])
            taken = self.documents.slice(number, first, first + len(row) - filled)
            row[filled : filled + len(taken)] = taken
            filled, index = filled + len(taken), index + 1
        return row


class FirstFitRows:
    """First fit: whole documents share a window where they fit; the remainder is padded and masked.

    A document longer than a window is cut into pieces of length L. The plan for a whole epoch is
    made at the start from the documents' lengths alone, so any window can be read without the
    windows before it, as in `Windows`. The plan takes a few seconds and 20 bytes per document.

    Raises:
      InputError: if there are no documents.
    """

    def __init__(
        self,
        documents: TokenDocuments,
        length: int,
        split: str,
        border: Border,
        seed: int | None = None,
        segments: bool = True,
    ):
        self.documents, self.length, self.border = documents, length, border
        self.segments = segments
        order = _shuffle(len(documents.lengths), seed)
        sizes = zip(order.tolist(), documents.lengths[order].tolist(), strict=True)
        pieces = (
            (number, first, min(length, size - first))
            for number, size in sizes
            for first in range(0, size, length)
        )
        rows, self.pieces = first_fit(pieces, length)
        if not len(rows):
            raise InputError(f"the {split} split has no documents; give more text")
        self.firsts = np.append(np.flatnonzero(np.diff(rows, prepend=-1)), len(rows))

    def __len__(self) -> int:
        return len(self.firsts) - 1

    def __getitem__(self, k: int) -> Example:
        inputs = np.full(self.length, self.border.opener, np.int32)
        targets = np.zeros(self.length, np.int32)
        mask = np.zeros(self.length, np.float32)
        starts = np.zeros(self.length, bool)
        position = 0
        for number, first in self.pieces[self.firsts[k] : self.firsts[k + 1]].tolist():
            before = min(first, 1)  # a piece that continues a document needs the token before it
            piece = self.documents.slice(number, first - before, first + self.length)
            stop = position + len(piece) - before
            tokens = tokens_of(piece)
            targets[position:stop] = tokens[before:]
            mask[position:stop] = is_trained(piece[before:])
            # The first input of a document stays the opener.
            inputs[position + 1 - before : stop] = tokens[:-1]
            starts[position] = True
            position = stop
        if position < self.length:
            starts[position] = True  # the padding belongs to no document
        example: Example = {"inputs": inputs, "targets": targets, "mask": mask}
        return add_segments(example, starts) if self.segments else example

    def batch(self, numbers: Sequence[int]) -> Example:
        """The rows of these numbers."""
        return stack([self[number] for number in numbers])


def stack(examples: Sequence[Example]) -> Example:
    """The batch of some examples."""
    rows: Any = examples
    batch: Any = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
    return batch


def _shuffle(count: int, seed: int | None) -> Integer[np.ndarray, " count"]:
    """The integers below `count`, in an order determined by `seed`."""
    return np.arange(count) if seed is None else np.random.default_rng(seed).permutation(count)


def first_fit(
    pieces: Iterator[tuple[int, int, int]], length: int
) -> tuple[Integer[np.ndarray, " pieces"], Integer[np.ndarray, "pieces 2"]]:
    """Puts each piece (document, first token, size) into the first open row of `length` with room.

    Full rows are closed, and so is the fullest if more than `_OPEN_ROWS` are open. Returns the row
    of each piece, in ascending order, and the pieces' (document, first token) in the same order.
    """
    rows, placed = [], []
    open_rows: dict[int, int] = {}  # room left, oldest first
    count = 0
    for number, first, size in pieces:
        row = next((row for row, room in open_rows.items() if room >= size), None)
        if row is None:
            row, count = count, count + 1
            open_rows[row] = length
        open_rows[row] -= size
        if not open_rows[row]:
            del open_rows[row]
        elif len(open_rows) > _OPEN_ROWS:
            # Into the row with the least room, the fewest pieces would still fit.
            del open_rows[min(open_rows, key=open_rows.__getitem__)]
        rows.append(row)
        placed.append((number, first))
    by_row = np.argsort(np.array(rows, np.int64), kind="stable")
    return np.array(rows, np.int64)[by_row], np.array(placed, np.int64).reshape(-1, 2)[by_row]
