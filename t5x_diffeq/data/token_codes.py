"""A token, whether its loss counts, and whether it ends a document: in one integer.

With data.loss_on=completion, some tokens are read but not trained on, and a chat template can write
`end_of_text` within a document. So documents of conversations hold codes instead of tokens:

- `token`: it is trained on. `end_of_text` as such ends its document;
- `token + 2**30`: it is trained on, and is an `end_of_text` within its document;
- `~code`, which is negative: it is not trained on.

Tokens are below 2**30. So the tokens of other documents are codes too: all are trained on.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Integer

CODE_DTYPE = np.dtype("<i4")
_WITHIN = 2**30
Codes = Integer[np.ndarray, "..."]


class Border(NamedTuple):
    """The tokens between two documents; most tokenizers have one for both.

    Attributes:
      end: closes a document, as a target.
      opener: opens the next one, as an input.
    """

    end: int
    opener: int


def token_dtype(vocab_size: int) -> np.dtype:
    """The smallest dtype that can hold every token."""
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")


def encode_tokens(
    tokens: Integer[np.ndarray, " length"], trained: Bool[np.ndarray, " length"], end_of_text: int
) -> Integer[np.ndarray, " length"]:
    """The codes of tokens that all lie within a document, before its end."""
    codes = tokens.astype(CODE_DTYPE)
    codes[codes == end_of_text] += _WITHIN
    return np.where(trained, codes, ~codes)


def is_trained(codes: Codes) -> Bool[np.ndarray, "..."]:
    """Whether the loss of each token counts."""
    return codes >= 0


def tokens_of(codes: Codes) -> Codes:
    """The token of each code."""
    if codes.dtype.kind == "u":
        return codes  # all tokens of the document are trained on
    return np.where(codes < 0, ~codes, codes) & (_WITHIN - 1)
