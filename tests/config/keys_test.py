"""What the keys of a config say of themselves."""

import dataclasses
import subprocess
import sys

from helpers import ROOT

from configs import default
from t5x_diffeq.config.config import KEYS, SECTIONS, Config, flatten
from t5x_diffeq.config.keys_page import help_of, page


def test_every_field_is_a_key_whose_default_it_can_take():
    fields = {
        f"{name}.{each.name}"
        for name, section in SECTIONS.items()
        for each in dataclasses.fields(section)
    }
    assert fields == {key for key in KEYS if "." in key}
    for name, key in KEYS.items():
        assert key.values.fault(key.default) is None, name


def test_the_config_file_has_the_defaults():
    assert Config.of(default.get_config()) == Config()
    assert flatten(default.get_config()) == {name: key.default for name, key in KEYS.items()}


def test_a_branch_may_differ_in_all_that_resuming_may_change():
    assert all(key.branch for key in KEYS.values() if key.resume)


def test_the_page_of_keys_is_up_to_date():
    """`python -m t5x_diffeq.config.keys_page > docs/keys.md` makes it."""
    assert (ROOT / "docs" / "keys.md").read_text() == page()


def test_help_says_what_a_key_is():
    (key, default, *meaning), differs = (
        text.splitlines() for text in help_of("optimizer.warmup_fraction", 80).split("\n\n")
    )
    assert key == "optimizer.warmup_fraction"
    assert default == "    Default 0.01; number, in [0, 1]. May differ in: branch, finetune."
    assert " ".join(map(str.strip, meaning)).startswith("fraction of train.total_steps over whi")
    assert differs[0].startswith("A key may differ between runs of one workdir (resume)")
    for word in ("warmup_fraction", "config.optimizer.warmup_fraction"):
        assert help_of(word, 80) == help_of("optimizer.warmup_fraction", 80)


def test_help_has_all_keys_or_those_of_a_section_as_plain_text():
    whole, section = help_of("keys", 72), help_of("mesh", 72)
    assert {name for name in KEYS if f"\n{name}\n" in f"\n{whole}"} == KEYS.keys()
    of_mesh = {name for name in KEYS if name.startswith("mesh.")}
    assert {name for name in KEYS if f"\n{name}\n" in section} == of_mesh
    assert section.startswith("config.mesh: ")
    assert not any(mark in whole for mark in ("`", "](", ".md"))
    assert max(map(len, whole.splitlines())) <= 72


def test_keys_are_known_without_jax():
    code = "import sys, t5x_diffeq.config.keys_page; sys.exit('jax' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_how_often_and_how_long_may_change_on_resume():
    for name, key in KEYS.items():
        if name.endswith(("_every", "_timeout")):
            assert key.resume, name
