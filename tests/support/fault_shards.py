"""Token shards of a little text, and every way to damage them."""

import json
import shutil

from fault_checkpoints import WAYS, files_of
from helpers import small_config

from t5x_diffeq.config.config import Config
from t5x_diffeq.data.manifest import MANIFEST
from t5x_diffeq.data.named_source import load_source
from t5x_diffeq.data.preparation import prepare_shards
from t5x_diffeq.data.recipe import tokenizer_in
from t5x_diffeq.data.shards import stem

NAMES = [stem("train", number, 2) for number in range(2)]
CHECKED = (".array_record", ".lengths.npy")  # of these every byte counts


def make_shards(folder):
    """Two shards of each split, of bytes."""
    (folder / "text").mkdir()
    for number in range(8):
        (folder / "text" / f"{number}.txt").write_text(f"document {number}\n" * 5)
    data = Config.of(small_config(folder / "text")).data
    source = load_source(data)
    tokenizer = tokenizer_in(folder / "made" / "tokenizer", data, source.train)
    prepare_shards(source, tokenizer, folder / "made", shards=2, workers=1)
    return folder / "made"


def data_of(shards):
    """A config's data that is these shards."""
    data = small_config(shards).data
    data.update(source="tokens", path=str(shards))
    return data


def edit(shards, change):
    """The manifest after `change`, which is given its parts."""
    path = shards / MANIFEST
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))


def swap(shards, end):
    """The contents of two files of the same kind, each under the other's name."""
    first, second = (shards / f"{name}{end}" for name in NAMES)
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)


def reverse(values):
    values.reverse()


EDITS = {
    "names": lambda m: reverse(m["train"]["names"]),
    "hashes": lambda m: reverse(m["train"]["sha256"]),
    "names and hashes": lambda m: [reverse(m["train"][key]) for key in ("names", "sha256")],
    "lengths": lambda m: reverse(m["train"]["lengths_sha256"]),
    "fewer": lambda m: [m["train"][key].pop() for key in ("names", "sha256")],
    "tokens": lambda m: m["train"].update(tokens=3),
    "no training": lambda m: m.pop("train"),
}


def shard_faults(shards):
    """Damages the shards in one way after the other; they are made whole in between.

    Yields what was damaged, how, and whether that has to be found.
    """
    whole = shutil.copytree(shards, shards.parent / "whole")

    def restore():
        shutil.rmtree(shards)
        shutil.copytree(whole, shards)

    for name in files_of(whole):
        for way in WAYS:
            restore()
            way(shards / name)
            file, before = shards / name, (whole / name).read_bytes()
            if not file.exists() or file.read_bytes() != before:
                yield str(name), way.__name__, name.name.endswith(CHECKED)
    for end in CHECKED:
        restore()
        swap(shards, end)
        yield end, "swap", True
    for name, change in EDITS.items():
        restore()
        edit(shards, change)
        yield MANIFEST, name, True
    restore()
