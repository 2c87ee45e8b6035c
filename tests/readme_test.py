"""The links and fences of the READMEs and of the site's pages."""

import re

import pytest
from helpers import PAGES, ROOT

FENCE = re.compile(r"^ *(```+)(.*)\n(?:.*\n)*?^ *\1$", re.M)


def without_fences(path):
    return FENCE.sub("", path.read_text())


def anchors(path):
    """What links to a page's headings and keys end in."""
    text = without_fences(path)
    headings = re.findall(r"^#+ (.*)$", text, re.M)
    slugs = {re.sub(r"[^\w\- ]", "", h.lower()).strip().replace(" ", "-") for h in headings}
    return slugs | set(re.findall(r'<a id="(.*?)">', text))


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path):
    """Files and headings that a page links to exist."""
    for target in re.findall(r"\]\(([^)\s]+)\)", without_fences(path)):
        if "://" in target or target.startswith("notebooks/"):  # which the build makes
            continue
        file, _, anchor = target.partition("#")
        there = (path.parent / file).resolve() if file else path
        assert there.exists(), target
        if anchor:
            assert anchor in anchors(there / "README.md" if there.is_dir() else there), target


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_fences_have_a_language(path):
    assert all(language for _, language in FENCE.findall(path.read_text()))
