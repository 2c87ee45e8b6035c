"""Prompts for figure 3 and appendix F: in each, the next word depends on an earlier one.

The paper shows a possessive pronoun that stands for a name (`its` after BIGBANG) and the noun that
an ordinal calls for (`match` after a Go player's fourth). These are sentences of our own of that
kind.
"""

FIGURE_3 = (
    "BIGBANG was formed in Seoul. In concert BIGBANG and",  # its
    "Lee Sedol lost three matches of Go to a computer in a row. He won the fourth",  # match
)
PROMPTS = (
    *FIGURE_3,
    "The ship left the harbour at dawn. Nobody on board knew that the",  # ship
    "Maria gave the letter to her brother because she trusted",  # him
    "Sleep changes with age. Children need more of it, and old people often say that they",  # sleep
    "Paris is the capital of France, and Rome is the capital of",  # Italy
)
