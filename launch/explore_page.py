"""Makes docs/explore.html and its pictures from examples/smooth; from a run, makes that first.

    PYTHONPATH=.:tests/support python launch/explore_page.py [WORKDIR]

examples/smooth gets what reading WORKDIR needs: config, tokenizer, parameters, validation text, and
the start of the training text. The pictures need Chromium (tests/support/browser.py).
"""

import json
import shutil
import sys
from pathlib import Path
from urllib.parse import urlencode

import browser
import jax.numpy as jnp
from PIL import Image
from selenium.webdriver.support.ui import WebDriverWait

import t5x_diffeq as td
from t5x_diffeq.checkpoints.checkpoint import Checkpoints
from t5x_diffeq.checkpoints.stored import RunFacts, TrainState
from t5x_diffeq.data.corpus import load_corpus
from t5x_diffeq.data.manifest import SPLITS, read_manifest
from t5x_diffeq.data.rows import Skipped
from t5x_diffeq.data.shards import ShardedDocuments, merge_shards, stem, write_shard
from t5x_diffeq.inference.explorer.answers import Explorer
from t5x_diffeq.inference.explorer.recording import write_recording

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
MODEL = ROOT / "examples" / "smooth"
TEXT = """\
TRANIO:
'Tis death for any one in Mantua
To come to Padua. Know you not the cause?
"""
_TRAINING_TOKENS = 4096  # of the first document of the training text, which are kept
STEPS, TOKEN, WIDTH, COLOURS = 3, 15, 900, 256  # of the pictures
ARRANGE = """
document.head.insertAdjacentHTML("beforeend", `<style>
  header, #controls, #legend, #token_note, #lenses, #about_link, #token_charts > :nth-child(2),
    main > section:last-of-type :is(h2, figure:not(:first-child)) { display: none }
  main { display: grid; grid-template-columns: 1fr 1fr; gap: 0 1.5rem }
  #views { grid-column: 1 / -1 } .charts { display: block }
  #token, .continuation { min-height: 0; border: none; margin: 0; padding: 0 }
</style>`)
"""  # the slider, the text, a token's loss at the nodes, and the loss at every N
DRAWN = "return document.querySelectorAll('#losses circle').length"


def keep_what_reading_needs(workdir: Path) -> None:
    """Writes examples/smooth, except its README."""
    for path in MODEL.iterdir():
        if path.name != "README.md":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    where = str(Path(str(td.load(workdir).config.data.path)).parent)  # of the text, on this machine
    for name in ("config.json", "data.json"):
        text = (workdir / name).read_text("utf-8")
        content = json.loads(text.replace(f"{where}/", ""))
        content.pop("digest", None)  # of the values before
        (MODEL / name).write_text(json.dumps(content, indent=2), "utf-8")
    shutil.copytree(workdir / "tokenizer", MODEL / "tokenizer")
    shards, kept = workdir / "data" / "0", MODEL / "data" / "0"
    shutil.copytree(shards / "tokenizer", kept / "tokenizer")
    facts = {key: value for key, value in read_manifest(shards).items() if key not in SPLITS}
    for key in ("shards", "skipped"):
        del facts[key]
    facts["source"] = Path(facts["source"]).name
    for split in SPLITS:
        documents = ShardedDocuments(shards, split)
        count = 1 if split == "train" else len(documents)
        most = _TRAINING_TOKENS if split == "train" else None
        rows = (documents[n][:most].astype(documents.dtype) for n in range(count))
        write_shard(kept, stem(split, 0, 1), rows, facts, Skipped())
    merge_shards(kept, 1, facts, 0.0)
    run = td.load(workdir).run
    with Checkpoints(MODEL, keep=1) as checkpoints:
        state = TrainState(jnp.asarray(run.step, jnp.int32), run.params, None)
        checkpoints.save(run.step, state, RunFacts(load_corpus(MODEL).fingerprint))
    for marker in MODEL.rglob("commit_success.txt"):  # only buckets need them; they name MODEL
        marker.unlink()


def take_pictures(page: Path) -> None:
    """Pictures of what the slider changes, in light and dark, with two dots for each CSS pixel."""
    at = urlencode({"a": f"smooth,{STEPS},euler", "at": TOKEN})
    for scheme in ("light", "dark"):
        with browser.open_browser() as opened:
            opened.show(page, WIDTH, scheme)
            opened.driver.get(f"{page.as_uri()}#{at}")
            WebDriverWait(opened.driver, 60).until(lambda _: opened.run(DRAWN) > 12)
            opened.run(ARRANGE)
            height = opened.run("return Math.ceil(document.body.getBoundingClientRect().height)")
            size = {"width": WIDTH, "height": height, "deviceScaleFactor": 2, "mobile": False}
            opened.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
            file = DOCS / "images" / f"explore-{scheme}.png"
            opened.save_picture(file)
            Image.open(file).convert("RGB").quantize(COLOURS).save(file, optimize=True)


def main() -> None:
    """Makes the model, if a run is given, the page and the pictures."""
    if sys.argv[1:]:
        keep_what_reading_needs(Path(sys.argv[1]))
    page = DOCS / "explore.html"
    write_recording(page, Explorer("smooth", td.load(MODEL)), TEXT)
    take_pictures(page)


if __name__ == "__main__":
    main()
