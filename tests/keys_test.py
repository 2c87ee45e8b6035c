"""What the keys of a config say of themselves."""

import dataclasses
import subprocess
import sys

from helpers import ROOT

from configs import default
from t5x_diffeq.config.config import KEYS, SECTIONS, Config, flatten
from t5x_diffeq.config.keys_page import page


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


def test_keys_are_known_without_jax():
    code = "import sys, t5x_diffeq.config.keys_page; sys.exit('jax' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_how_often_and_how_long_may_change_on_resume():
    for name, key in KEYS.items():
        if name.endswith(("_every", "_timeout")):
            assert key.resume, name
