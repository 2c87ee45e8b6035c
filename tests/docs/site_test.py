"""The documentation site builds without a warning, reads without a network, and finds every key."""

import http.server
import json
import os
import random
import re
import shutil
import sys
import threading
from functools import partial
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import browser
import pytest
from compilation import flags_of_processes
from helpers import ROOT, run_to_end
from patience import patience

from t5x_diffeq.cli import VERBS
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
    "own_term": r"20 -?\d\.\d+ \d",
    "train_and_look_inside": r"Heun: .*perplexity(.|\n)*'def main\(\):",
}
ASK = """
const [queries, answer] = arguments, found = {};
const search = new Worker(JSON.parse(document.getElementById("__config").textContent).search);
search.onmessage = ({data}) => {
  if (data.type == 3)
    found[queries.shift()] = data.data.items.map((page) => page.map((hit) => hit.location));
  queries.length ? search.postMessage({type: 2, data: queries[0]}) : answer(found);
};
fetch("search/search_index.json").then((index) => index.json()).then(
  (index) => search.postMessage({type: 0, data: {...index, options: {}}}));
"""  # what the page's own search finds for each query: pages, best first, each with its hits
TOPICS = {  # what a reader may look for, and the page that comes first
    "ImportError": "troubleshooting",
    "nan": "troubleshooting",
    "OOM": "troubleshooting",
    "sharding": "meshes",
    "llama": "choosing",
    "LoRA": "finetuning",
    "resume": "operating",
    "preemption": "launch/tpu",
    "requeue": "launch/slurm",
    "conversations": "data",
    "explorer": "depth",
    "Hugging Face": "huggingface",
    "vLLM": "huggingface",
    "security": "security",
    **dict.fromkeys(("tokenizer", "packing", "mixture", "TensorBoard", "hook"), "keys"),
    **dict.fromkeys(("spectra", "Lyapunov"), "analysis"),
    **dict.fromkeys(("solver", "hypernetwork"), "concepts"),
    "Muon": "lab/optimizers",
    "perplexity": "verbs",
    "velocity penalty": "keys",
    "own block": "keys",
    **dict.fromkeys(
        (
            *("looped", "recurrent depth", "weight sharing", "Universal Transformer"),
            *("hyper-connections", "value residual", "early exit", "elastic depth"),
        ),
        "structures",
    ),
}
FAINT = """
const canvas = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
const rgba = (colour) => {
  canvas.clearRect(0, 0, 1, 1);
  canvas.fillStyle = colour;
  canvas.fillRect(0, 0, 1, 1);
  return [...canvas.getImageData(0, 0, 1, 1).data];
};
const linear = (c) => (c /= 255) <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
const light = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b) + 0.05;
const behind = (element) => {
  for (; element; element = element.parentElement) {
    const colour = rgba(getComputedStyle(element).backgroundColor);
    if (colour[3] == 255) return colour;
  }
  return [255, 255, 255, 255];
};
const faint = new Set();
for (const element of document.querySelectorAll(".md-content a[href], .md-content code *")) {
  if (!element.getClientRects().length || element.matches(".headerlink, .md-content__button"))
    continue;
  const both = [light(rgba(getComputedStyle(element).color)), light(behind(element))];
  if (Math.max(...both) / Math.min(...both) < 4.5)
    faint.add(`${element.className} ${element.textContent}`);
}
return [...faint];
"""  # the links and the code of a page whose contrast is below 4.5:1
LOADING = {"src", "srcset", "poster", "data"}  # attributes whose address is loaded
STATUSES = ("1", "2", "42", "130", "175")
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
def project(tmp_path_factory):
    """A copy of what the site is made of."""
    folder = tmp_path_factory.mktemp("project")
    for name in ("docs", "examples", "launch"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("notebooks"))
    shutil.copy(ROOT / "mkdocs.yml", folder)
    (folder / "t5x_diffeq").symlink_to(ROOT / "t5x_diffeq")
    return folder


def write_notebooks(project, *options):
    command = [sys.executable, "launch/notebooks.py", *options]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags_of_processes()}
    ended = run_to_end(command, cwd=project, env=environment)
    assert ended.returncode == 0, ended.stderr[-4000:]


@pytest.fixture(scope="module")
def site(project):
    """The built site, with examples that weren't executed."""
    write_notebooks(project)
    ended = run_to_end([sys.executable, "-m", "mkdocs", "build", "--strict"], cwd=project)
    assert ended.returncode == 0, ended.stderr[-4000:]
    return project / "build" / "site"


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


@pytest.fixture(scope="module")
def found(site):
    """What the search finds for each key, verb and exit status."""
    handler = partial(http.server.SimpleHTTPRequestHandler, directory=site)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever).start()
    names = {key.rpartition(".")[2] for key in KEYS}
    with browser.open_browser() as page:
        page.driver.get(f"http://127.0.0.1:{server.server_port}/index.html")
        page.driver.set_script_timeout(patience(120))
        found = page.driver.execute_async_script(ASK, [*names, *KEYS, *VERBS, *STATUSES, *TOPICS])
    server.shutdown()
    return found


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.skipif(bool(browser.why_not()), reason=browser.why_not())
def test_search_finds_every_key(found):
    """By its name without the section, and with it; the page of keys comes first."""
    words = {word for key in KEYS for word in key.split(".")}
    for key in KEYS:
        # Among the first, as what begins with its name (train.depths_rows) may come before it.
        assert f"keys.html#{key}" in found[key][0][:8], (key, found[key])
        name = key.rpartition(".")[2]
        longer = {word for word in words - {name} if word.startswith(name)}
        if name != "every":  # which the search leaves out, as it does "the"
            hits = found[name][0] if longer else found[name][0][:1]
            assert f"keys.html#{key}" in hits, (key, found[name])


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.skipif(bool(browser.why_not()), reason=browser.why_not())
def test_search_finds_every_verb_and_exit_status(found):
    for verb in VERBS:  # keys begin with `train`, too
        assert f"verbs.html#{verb}" in {hits[0] for hits in found[verb][:2]}, found[verb]
    for status in STATUSES:
        assert found[status][0][0] == "operating.html#exit-statuses", found[status]


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.skipif(bool(browser.why_not()), reason=browser.why_not())
def test_search_finds_topics(found):
    for topic, page in TOPICS.items():
        assert found[topic] and found[topic][0][0].startswith(f"{page}.html"), found[topic]


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.skipif(bool(browser.why_not()), reason=browser.why_not())
def test_links_and_code_can_be_read_in_the_dark(site):
    with browser.open_browser() as page:
        for name in ("api", "quickstart"):
            page.show(site / f"{name}.html", 1280, "dark")
            assert page.run(FAINT) == [], name


@pytest.mark.slow
def test_examples_print_what_they_should(project, whole):
    """A third of them, others for each commit, in the notebook to download."""
    chance = random.Random(os.environ["T5X_DIFFEQ_SAMPLE"])
    executed = list(PRINTED) if whole else chance.sample(list(PRINTED), len(PRINTED) // 3)
    write_notebooks(project, "--execute", *executed)
    write_notebooks(project)  # which keeps what was executed
    for example in executed:
        notebook = json.loads((project / "docs/notebooks" / f"{example}.ipynb").read_text())
        outputs = [each for cell in notebook["cells"] for each in cell.get("outputs", ())]
        printed = "".join("".join(each["text"]) for each in outputs if each.get("name") == "stdout")
        assert re.search(PRINTED[example], printed), printed
