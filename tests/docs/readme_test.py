"""The links and fences of the READMEs and of the site's pages."""

import ast
import re
import textwrap

import pytest
from helpers import PAGES, ROOT

FENCE = re.compile(r"^ *(```+)(.*)\n((?:.*\n)*?)^ *\1$", re.M)


def without_fences(path):
    return FENCE.sub("", path.read_text())


def anchors(path):
    """What links to a page's headings and keys end in."""
    text = without_fences(path)
    headings = re.findall(r"^#+ (.*?)(?: \{#.*)?$", text, re.M)
    slugs = {re.sub(r"[^\w\- ]", "", h.lower()).strip().replace(" ", "-") for h in headings}
    return slugs | set(re.findall(r"^#.* \{#(.*)\}$", text, re.M))


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path):
    """Files and headings that a page links to exist."""
    for target in re.findall(r"\]\(([^)\s]+)\)", without_fences(path)):
        if "://" in target or target.startswith("notebooks/"):  # which the build makes
            continue
        file, _, anchor = target.partition("#")
        there = (path.parent / file).resolve() if file else path
        assert there.exists(), target
        if anchor and there.suffix != ".png":  # whose #only-dark is the site's
            assert anchor in anchors(there / "README.md" if there.is_dir() else there), target


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_fences_have_a_language(path):
    """And those in Python are Python."""
    for _, language, code in FENCE.findall(path.read_text()):
        assert language, code
        if language == "python":
            compile(textwrap.dedent(code), str(path), "exec")


def text_of(node):
    """A string of the source, with `{}` for what an f-string inserts."""
    if isinstance(node, ast.JoinedStr):
        return "".join(
            text_of(each) if isinstance(each, ast.Constant) else "{}" for each in node.values
        )
    return str(node.value)


def test_messages_of_troubleshooting_are_the_programs():
    """The first column of the tables by message; `...` stands for what differs."""
    trees = [ast.parse(path.read_text()) for path in (ROOT / "t5x_diffeq").rglob("*.py")]
    strings = [
        text_of(node)
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant | ast.JoinedStr)
    ]
    page = (ROOT / "docs" / "troubleshooting.md").read_text().partition("## Out of memory")[0]
    messages = re.findall(r"^\| `(.*?)` \|", page, re.M)
    assert len(messages) > 30
    for message in messages:
        parts = map(re.escape, re.split(r"\.\.\.+", message))
        pattern = re.compile(".*".join(parts))
        assert any(map(pattern.search, strings)), message
