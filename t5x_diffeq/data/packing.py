"""Fixed windows over a row of tokens: documents concatenated, then split."""

from typing import TypedDict

import numpy as np
from jaxtyping import Float, Integer

from t5x_diffeq.errors import InputError


class Example(TypedDict):
    """What the model reads, what it should say, and which of that counts.

    Each `[L]`, and `[B, L]` in a batch.
    """

    inputs: Integer[np.ndarray, "..."]
    targets: Integer[np.ndarray, "..."]
    mask: Float[np.ndarray, "..."]


class Windows:
    """Window k predicts tokens kL + 1 .. kL + L from those before: each token once.

    Random access, so that the batch of any step can be had without those before it.

    Args:
      tokens: the row.
      length: L.
      split: its name, for messages.
      ragged: whether a last, shorter window is kept (padded and masked).

    Raises:
      InputError: if not even one window can be filled.
    """

    def __init__(
        self, tokens: Integer[np.ndarray, " tokens"], length: int, split: str, ragged: bool = False
    ):
        self.tokens, self.length = tokens, length
        predicted = max(len(tokens) - 1, 0)
        self.count = -(-predicted // length) if ragged else predicted // length
        if self.count < 1:
            raise InputError(
                f"data.sequence_length={length} needs {1 if ragged else length} + 1 tokens, and "
                f"the {split} split has {len(tokens)}; shorten the sequence or give more text"
            )

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, k: int) -> Example:
        """Window k."""
        window = self.tokens[k * self.length : (k + 1) * self.length + 1].astype(np.int32)
        missing = self.length + 1 - len(window)
        mask = np.ones(self.length, np.float32)
        mask[self.length - missing :] = 0
        window = np.pad(window, (0, missing))
        return {"inputs": window[:-1], "targets": window[1:], "mask": mask}
