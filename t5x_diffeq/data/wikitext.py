"""Splits WikiText into articles, and restores natural text from its tokens.

WikiText is Wikipedia's text as split by the Moses tokenizer: every punctuation mark is a token
between spaces, `@-@`, `@,@` and `@.@` stand for marks inside a word or a number, and an apostrophe
begins the token after it (`game 's`, `don 't`, `O 'Brien`).

Merity et al., Pointer Sentinel Mixture Models, 2016 (arXiv:1609.07843). Koehn et al., Moses: Open
Source Toolkit for Statistical Machine Translation, ACL 2007.
"""

import re
from collections.abc import Iterable, Iterator
from itertools import pairwise

JOINERS = {"@-@": "-", "@,@": ",", "@.@": "."}
CLOSING = frozenset(",.;:!?)]}%")  # no space before
OPENING = frozenset("([{")  # no space after
SIGNS = frozenset("$£€¥#")  # no space before a number
_APOSTROPHE = re.compile(r"'[^\W\d_]|n't$")
_HEADING = re.compile(r"((?:= )+)(.+?)((?: =)+)")
# A word that ends in s, which an apostrophe may follow. After the listed words, it opens a quote.
_PLURAL = re.compile(r"(?!(?:as|does|has|his|is|its|says|this|was)$).*s", re.IGNORECASE)


def articles(lines: Iterable[str]) -> Iterator[str]:
    """The articles of a WikiText file, each with its title; text before the first title is one too.

    An article begins at ` = Title = ` between blank lines, with one equals sign on each side.
    ` = = Section = = ` doesn't begin one, nor does such a line within a paragraph.
    """
    article: list[str] = []
    for line in lines:
        if not line.strip() and _ends_in_title(article):
            if before := "".join(article[:-1]).strip():
                yield before
            del article[:-1]
        article.append(line)
    if rest := "".join(article).strip():
        yield rest


def _ends_in_title(lines: list[str]) -> bool:
    """Whether the last line is an article's title, with a blank line or nothing before it."""
    tokens = lines[-1].split() if lines else []
    marked = len(tokens) >= 3 and tokens[0] == tokens[-1] == "="
    return marked and "=" not in (tokens[1], tokens[-2]) and not "".join(lines[-2:-1]).strip()


def detokenize(text: str) -> str:
    """The original text, where the tokens determine it.

    Only spaces change, the joiners `@-@`, `@,@`, `@.@`, and runs of blank lines, which become one.
    If in doubt, a space stays: around dashes, ellipses, single quotes, unpaired double quotes, and
    slashes except in fractions.
    """
    lines = "\n".join(map(_detokenize_line, text.split("\n")))
    return re.sub(r"\n{3,}", "\n\n", lines).strip("\n")


def _detokenize_line(line: str) -> str:
    """A paragraph, or a heading: `= = Career = =` becomes `== Career ==`."""
    line = line.strip()
    heading = _HEADING.fullmatch(line)
    if not heading or heading[1].count("=") != heading[3].count("="):
        return _join(line)
    marks = "=" * heading[1].count("=")
    return f"{marks} {_join(heading[2])} {marks}"


def _join(line: str) -> str:
    tokens = [token for token in line.split(" ") if token]
    closed = {
        i for i, (before, after) in enumerate(pairwise(tokens)) if _belong_together(before, after)
    }
    closed.update(_gaps_at_quotes(tokens), _gaps_in_numbers(tokens), [len(tokens) - 1])
    pieces = ((JOINERS.get(token, token), i) for i, token in enumerate(tokens))
    return "".join(piece if i in closed else f"{piece} " for piece, i in pieces)


def _belong_together(before: str, after: str) -> bool:
    """Whether two tokens by themselves show that there was no space between them."""
    return (
        before in JOINERS
        or after in JOINERS
        or before in OPENING
        or after in CLOSING
        or (before[-1].isalnum() and _APOSTROPHE.match(after) is not None)
        or (before in SIGNS and after[0].isdigit())
        or (before == "°" and after in ("C", "F"))
    )


def _gaps_at_quotes(tokens: list[str]) -> Iterator[int]:
    """Gaps that quotes and possessives close, each as the index of the token before it.

    Double quotes open and close alternately, if their number is even. A separate apostrophe is a
    possessive (`players ' names`) if no apostrophe in the line can belong to a quotation.
    """
    double = [i for i, token in enumerate(tokens) if token == '"']
    if len(double) % 2 == 0:
        yield from double[::2]
        yield from (i - 1 for i in double[1::2])
    single = [i for i, token in enumerate(tokens) if token == "'"]
    if all(i > 0 and _PLURAL.fullmatch(tokens[i - 1]) for i in single):
        yield from (i - 1 for i in single)


def _gaps_in_numbers(tokens: list[str]) -> Iterator[int]:
    """Gaps within times and ratios (`22 : 30`) and fractions (`1 / 2`), by the token before."""
    for i, (before, mark, after) in enumerate(zip(tokens, tokens[1:], tokens[2:], strict=False)):
        digits = before.isdigit() and after.isdigit()
        if digits and (mark == "/" or (mark == ":" and len(before) <= 2 == len(after))):
            yield from (i, i + 1)
