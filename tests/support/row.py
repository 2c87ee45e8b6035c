"""Tokenised documents in memory, one behind the other."""

import numpy as np

from t5x_diffeq.data.tokenizer import Border


class Row:
    def __init__(self, tokens, lengths):
        self.tokens, self.lengths = tokens, np.asarray(lengths)
        self.ends = np.cumsum(lengths)

    def slice(self, number, start, stop):
        first = int(self.ends[number] - self.lengths[number])
        return self.tokens[first + start : min(first + stop, int(self.ends[number]))]

    def __getitem__(self, number):
        return self.slice(number, 0, int(self.lengths[number]))


BORDER = Border(0, 0)  # of most documents in tests: 0 closes one, and opens the next
