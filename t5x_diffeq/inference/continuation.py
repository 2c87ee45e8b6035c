"""What a model says after a prompt, token by token, until it is to end."""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from t5x_diffeq.data.tokenizer import Tokenizer


class Continuation:
    """A prompt and what follows it.

    Args:
      tokenizer: of both.
      prompt: its tokens.
      stops: texts, none of them empty, at which to end.
      limit: end after so many tokens; None: never for that.

    Attributes:
      ended: whether nothing more is to follow.
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
        """One token more, unless it has ended; with it, it may."""
        if self.ended or token == self.tokenizer.end_of_text:
            self.ended = True
            return
        self.tokens.append(token)
        found = self.uncut()
        self.ended = len(self.tokens) == self.limit or any(stop in found for stop in self.stops)

    def uncut(self) -> str:
        """The text after the prompt, and the stop that ended it."""
        whole = self.tokenizer.decode(self.prompt + self.tokens)
        return whole[len(self.tokenizer.decode(self.prompt)) :]

    def following(self) -> str:
        """The text after the prompt, up to the first stop."""
        found = self.uncut()
        ends = [found.find(stop) for stop in self.stops if stop in found]
        return found[: min(ends, default=len(found))]

    def text(self) -> str:
        """Prompt and continuation."""
        return self.tokenizer.decode(self.prompt) + self.following()


def grow(rows: Sequence[Continuation], generated: Iterable[np.ndarray]) -> Iterator[None]:
    """Adds a generated token to each row at a time, until all rows have ended.

    Args:
      rows: to add to.
      generated: a token per row at a time; those of further rows are left out.
    """
    for tokens in generated:
        for row, token in zip(rows, tokens.tolist(), strict=False):
            row.add(token)
        yield
        if all(row.ended for row in rows):
            return
