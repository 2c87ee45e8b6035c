"""A prompt's continuation, token by token, until a stop or the limit is reached."""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from t5x_diffeq.data.tokenizer import Tokenizer


class Continuation:
    """A prompt and what follows it.

    Args:
      tokenizer: the tokenizer of both.
      prompt: the prompt's tokens.
      stops: non-empty texts, at each of which the continuation ends.
      limit: most tokens to add; None for no limit.

    Attributes:
      ended: whether the continuation is complete.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: list[int],
        stops: Sequence[str] = (),
        limit: int | None = None,
    ):
        self.tokenizer, self.prompt, self.stops, self.limit = tokenizer, prompt, stops, limit
        self.tokens: list[int] = []
        self.ended = False

    def add(self, token: int) -> None:
        """Adds a token, which may end the continuation; does nothing if it has ended."""
        if self.ended or token == self.tokenizer.end_of_text:
            self.ended = True
            return
        self.tokens.append(token)
        found = self._raw_completion()
        self.ended = len(self.tokens) == self.limit or any(stop in found for stop in self.stops)

    def _raw_completion(self) -> str:
        """The text after the prompt, including the stop that ended it."""
        whole = self.tokenizer.decode(self.prompt + self.tokens)
        return whole[len(self.tokenizer.decode(self.prompt)) :]

    def completion(self) -> str:
        """The text after the prompt, up to the first stop."""
        found = self._raw_completion()
        ends = [found.find(stop) for stop in self.stops if stop in found]
        return found[: min(ends, default=len(found))]

    def text(self) -> str:
        """Prompt and continuation."""
        opened = self.prompt[:1] == [self.tokenizer.opener]
        return self.tokenizer.decode(self.prompt[opened:]) + self.completion()


def grow(rows: Sequence[Continuation], generated: Iterable[np.ndarray]) -> Iterator[None]:
    """Adds the generated tokens to the rows, one token each at a time, until all rows have ended.

    Args:
      rows: the continuations to extend.
      generated: yields one token per row; tokens of any further rows are ignored.
    """
    for tokens in generated:
        for row, token in zip(rows, tokens.tolist(), strict=False):
            row.add(token)
        yield
        if all(row.ended for row in rows):
            return
