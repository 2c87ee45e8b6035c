"""Documents concatenated, then split into windows of fixed length; random access."""

from typing import Protocol, TypedDict, runtime_checkable

import numpy as np
from jaxtyping import Float, Integer

from t5x_diffeq.errors import InputError


@runtime_checkable
class TokenDocuments(Protocol):
    """Tokenised documents by number, and the length of each without reading any."""

    lengths: np.ndarray

    def __getitem__(self, number: int) -> np.ndarray:
        """The tokens of document `number`, `end_of_text` included."""


class DocumentsInRow:
    """Documents that lie one behind the other in a row of tokens.

    Attributes:
      tokens: the row.
      lengths: of each document.
    """

    def __init__(
        self, tokens: Integer[np.ndarray, " tokens"], lengths: Integer[np.ndarray, " documents"]
    ):
        self.tokens, self.lengths = tokens, lengths
        self.ends = np.cumsum(lengths, dtype=np.int64)

    def __getitem__(self, number: int) -> Integer[np.ndarray, " length"]:
        """The tokens of document `number`."""
        return self.tokens[self.ends[number] - self.lengths[number] : self.ends[number]]


class Example(TypedDict):
    """What the model reads, what it should say, and which of that counts.

    Each `[L]`, and `[B, L]` in a batch.
    """

    inputs: Integer[np.ndarray, "..."]
    targets: Integer[np.ndarray, "..."]
    mask: Float[np.ndarray, "..."]


class Windows:
    """Window k predicts tokens kL + 1 .. kL + L of all documents in a row: each token once.

    Prefix sums of the documents' lengths say which documents a window takes tokens from, so that
    any window can be had without those before it, in any order of the documents.

    Args:
      documents: the documents.
      length: L.
      split: its name, for messages.
      ragged: whether a last, shorter window is kept (padded and masked).
      seed: shuffles the documents; None keeps their order.

    Raises:
      InputError: if not even one window can be filled.
    """

    def __init__(
        self,
        documents: TokenDocuments,
        length: int,
        split: str,
        ragged: bool = False,
        seed: int | None = None,
    ):
        self.documents, self.length = documents, length
        count = len(documents.lengths)
        in_order = np.arange(count)
        self.order = in_order if seed is None else np.random.default_rng(seed).permutation(count)
        self.ends = np.cumsum(documents.lengths[self.order], dtype=np.int64)
        tokens = int(self.ends[-1]) if count else 0
        predicted = max(tokens - 1, 0)
        self.count = -(-predicted // length) if ragged else predicted // length
        if self.count < 1:
            raise InputError(
                f"data.sequence_length={length} needs {1 if ragged else length} + 1 tokens, and "
                f"the {split} split has {tokens}; shorten the sequence or give more text"
            )

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, k: int) -> Example:
        """Window k."""
        window = self.tokens(k * self.length, (k + 1) * self.length + 1)
        missing = self.length + 1 - len(window)
        mask = np.ones(self.length, np.float32)
        mask[self.length - missing :] = 0
        window = np.pad(window, (0, missing))
        return {"inputs": window[:-1], "targets": window[1:], "mask": mask}

    def tokens(self, start: int, stop: int) -> Integer[np.ndarray, " tokens"]:
        """Tokens `start` to `stop` of the row, or to its end."""
        parts = []
        place = int(np.searchsorted(self.ends, start, side="right"))
        while start < stop and place < len(self.order):
            number, end = int(self.order[place]), int(self.ends[place])
            first = end - int(self.documents.lengths[number])
            parts.append(self.documents[number][start - first : stop - first])
            start, place = end, place + 1
        return np.concatenate(parts).astype(np.int32)
