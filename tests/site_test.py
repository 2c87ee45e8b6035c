"""The documentation site builds without a warning, reads without a network, and has every key."""

import json
import os
import random
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest
from compilation import flags_of_processes
from helpers import ROOT, run_to_end

from t5x_diffeq.config.config import KEYS

EXAMPLES = ROOT / "examples"
PRINTED = {  # what the last lines of each example say
    "analysis_of_a_run": r"':': largest exponent -?\d",
    "ode_from_pretrained": r"8 steps: \d",
    "own_basis": r"'loss': \d",
    "own_block": r"ode .*loss(.|\n)*baseline .*loss",
    "own_hook": r"'step': 10, 'parameter_norm/all': \d",
    "own_scheme": r"own_scheme:ralston: errors .* order (1\.[89]|2\.[01])(.|\n)*'loss'",
    "own_source": r"'loss': \d",
    "train_and_look_inside": r"Heun: .*perplexity(.|\n)*'def main\(\):",
}
LOADING = {"src", "srcset", "poster", "data"}  # attributes whose address is loaded
LOADED_LINKS = {"stylesheet", "icon", "preload", "modulepreload", "preconnect", "manifest"}


class Page(HTMLParser):
    """What a page loads, what it links to, and its anchors."""

    def __init__(self, path: Path):
        super().__init__()
        self.loads, self.links, self.anchors = [], [], set()
        self.feed(path.read_text())

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.anchors |= {given[name] for name in ("id", "name") if given.get(name)}
        self.loads += [value for name, value in attrs if name in LOADING and value]
        if tag == "link" and LOADED_LINKS & set((given.get("rel") or "").split()):
            self.loads.append(given["href"])
        if tag == "a" and given.get("href"):
            self.links.append(given["href"])


@pytest.fixture(scope="module")
def executed(whole):
    """The examples that the built site executes: a third of them, others for each commit."""
    chance = random.Random(os.environ["T5X_DIFFEQ_SAMPLE"])
    return list(PRINTED) if whole else chance.sample(list(PRINTED), len(PRINTED) // 3)


@pytest.fixture(scope="module")
def site(tmp_path_factory, executed):
    """The built site; some examples run meanwhile."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", f"--site-dir={folder}"]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags_of_processes()}
    environment["EXAMPLES"] = ",".join(executed)
    ended = run_to_end(command, env=environment)
    assert ended.returncode == 0, ended.stderr[-4000:]
    return folder


@pytest.fixture(scope="module")
def pages(site):
    return {path: Page(path) for path in site.rglob("*.html")}


def test_each_example_is_known():
    assert list(PRINTED) == sorted(path.stem for path in EXAMPLES.glob("[!_]*.py"))
    for name in PRINTED:
        assert f"python -m examples.{name}\n" in (EXAMPLES / f"{name}.py").read_text()


def test_the_page_of_verbs_is_up_to_date():
    command = [sys.executable, "launch/verbs_page.py"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    made = run_to_end(command, env=environment)
    assert made.stdout == (ROOT / "docs" / "verbs.md").read_text(), made.stderr


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.in_turns("whole programs")
def test_pages_load_nothing_from_another_host(site, pages):
    assert len(pages) > 30
    for path, page in pages.items():
        assert not [address for address in page.loads if "//" in address], path
    for path in site.rglob("*.css"):
        assert not re.findall(r"(?:url\(|@import)\s*['\"]?\w*:?//", path.read_text()), path


@pytest.mark.slow
@pytest.mark.every_case
def test_links_and_anchors_hold(site, pages):
    """Of the built pages, with what plugins add; 404.html has addresses from the root."""
    for path, page in pages.items():
        for link in page.links if path.name != "404.html" else ():
            if re.match(r"\w+:", link):
                continue
            file, _, anchor = unquote(link).partition("#")
            there = (path.parent / file).resolve() if file else path
            there = there / "index.html" if there.is_dir() else there
            assert there.exists(), f"{path.relative_to(site)}: {link}"
            if anchor and there in pages:
                assert anchor in pages[there].anchors, f"{path.relative_to(site)}: {link}"


@pytest.mark.slow
@pytest.mark.every_case
def test_all_keys_are_on_the_site(site, pages):
    assert KEYS.keys() <= pages[site / "keys.html"].anchors


@pytest.mark.slow
def test_examples_print_what_they_should(site, executed):
    """What its cells print on standard output, in the notebook to download."""
    for example in executed:
        notebook = json.loads((site / "notebooks" / f"{example}.ipynb").read_text())
        outputs = [each for cell in notebook["cells"] for each in cell.get("outputs", ())]
        printed = "".join("".join(each["text"]) for each in outputs if each.get("name") == "stdout")
        assert re.search(PRINTED[example], printed), printed
