"""WikiText-103's tokenized lines as natural text."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from t5x_diffeq.data import wikitext
from t5x_diffeq.data.wikitext import articles, detokenize


def test_articles_begin_at_titles_between_blank_lines():
    text = (
        "|= First =||A line .|= No title =||= = Section = =||= Nor this =|a line|||"
        "= Second ( album ) =|||= Third =||Text = text =||= = = Deep = = =|= Last ="
    )
    lines = [f" {line} \n" if line else " \n" for line in text.split("|")]
    first, second, third = articles(lines)
    assert first.startswith("= First =") and first.endswith("= Nor this = \n a line")
    assert second == "= Second ( album ) ="
    assert third.startswith("= Third =") and third.endswith("= Last =")
    assert list(articles(["Before . \n", " \n", " = A = \n", " \n"])) == ["Before .", "= A ="]
    assert list(articles([" \n", "\n"])) == []


TOKENIZED = {
    " The ship 's guns weren 't all 12 @-@ pounders . ": "The ship's guns weren't all 12-pounders.",
    " It cost US $ 1 @,@ 250 ( £ 800 @.@ 50 ) . ": "It cost US $1,250 (£800.50).",
    ' He said , " I \'ll go " ; she ( she ! ) stayed . ': 'He said, "I\'ll go"; she (she!) stayed.',
    " They left Xi 'an with Miles O 'Hara at 22 : 05 , didn 't they ? ": (
        "They left Xi'an with Miles O'Hara at 22:05, didn't they?"
    ),
    " About 40 % of the players ' names [ sic ] : all wrong ! ": (
        "About 40% of the players' names [sic]: all wrong!"
    ),
    " = = Early life = = ": "== Early life ==",
    " = = = Tours ( 1990 — 95 ) = = = ": "=== Tours (1990 — 95) ===",
    ' The so @-@ called " Red " and " Blue " teams . ': 'The so-called "Red" and "Blue" teams.',
    " It was ' grand ' , he thought ; others ' views ... differ . ": (
        "It was ' grand ', he thought; others ' views ... differ."
    ),
    ' ( " Why ? " ) ': '("Why?")',
    " Senjō ( Japanese : 戦場 , lit . field ) <unk> , No . 1 ": (
        "Senjō (Japanese: 戦場, lit. field) <unk>, No. 1"
    ),
    "": "",
}


@pytest.mark.parametrize(("tokenized", "natural"), TOKENIZED.items())
def test_detokenized_lines(tokenized, natural):
    assert detokenize(tokenized) == natural
    assert detokenize(natural) == natural


def test_detokenized_paragraphs():
    text = " = A = \n \n \n \n One . \n Two . \n \n = = B = = \n \n Three . \n "
    assert detokenize(text) == "= A =\n\nOne.\nTwo.\n\n== B ==\n\nThree."


TOKEN = st.sampled_from([*wikitext.CLOSING, *wikitext.OPENING, *wikitext.SIGNS, *wikitext.JOINERS])
WORD = st.text(st.characters(categories=["L", "N"]), min_size=1, max_size=6)
MARK = st.sampled_from(['"', "'", "'s", "n't", "/", "=", "—", "...", "°", "C", "\n"])


@settings(deadline=None)
@given(st.lists(TOKEN | WORD | MARK))
def test_only_spaces_and_joiners_change(tokens):
    wanted = "".join(wikitext.JOINERS.get(token, token) for token in tokens)
    assert "".join(detokenize(" ".join(tokens)).split()) == "".join(wanted.split())


PIECES = [
    ("{0}", "{0}"),
    ("{0} @-@ {1}", "{0}-{1}"),
    ("{0} 's", "{0}'s"),
    ("( {0} {1} )", "({0} {1})"),
    ('" {0} , {1} "', '"{0}, {1}"'),
    ("3 @,@ 000 @.@ 5 %", "3,000.5%"),
    ("[ {0} ]", "[{0}]"),
    ("$ 7", "$7"),
]
LATIN = st.text("abcdefghijklmnopqrstuvwxyzéüß", min_size=1, max_size=6)
PIECE = st.tuples(st.sampled_from(PIECES), LATIN, LATIN, st.sampled_from(["", ",", ";", ".", "?"]))


@settings(deadline=None)
@given(st.lists(PIECE, min_size=1))
def test_natural_text_comes_back_and_stays(pieces):
    tokenized = [f"{p[0].format(a, b)} {mark}".strip() for p, a, b, mark in pieces]
    natural = " ".join(p[1].format(a, b) + mark for p, a, b, mark in pieces)
    assert detokenize(" ".join(tokenized)) == natural
    assert detokenize(natural) == natural
