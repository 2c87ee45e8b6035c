"""What `convert` refuses: each row of the table is refused, with its value and the way out."""

import re

import pytest
from helpers import ROOT

from t5x_diffeq.hf.config_json import check_window, model_keys
from t5x_diffeq.hf.families import FAMILIES
from t5x_diffeq.hf.refusals import KEYS, TYPES, table
from t5x_diffeq.system.errors import InputError


def config_json(kind, **changes):
    """That of a small model which can be converted."""
    family = FAMILIES[kind]
    sizes = {theirs: 8 for ours, theirs in family.keys.items() if ours != "activation"}
    activation = {family.keys["activation"]: next(iter(family.activations))}
    return {"model_type": kind, "vocab_size": 8, **sizes, **activation, **changes}


def read(found):
    model_keys(found)
    check_window(found, 24)


@pytest.mark.parametrize("kind", FAMILIES)
def test_every_class_is_converted(kind):
    read(config_json(kind))


@pytest.mark.parametrize("key", KEYS)
def test_keys_of_the_table_are_refused(key):
    each = KEYS[key]
    is_part = isinstance(each.value, dict) and key in each.value
    changes = {"rope_scaling": each.value} if is_part else {key: each.value}
    said = each.value[key] if is_part else each.value
    said = said["rope_type"] if key == "rope_scaling" else said
    with pytest.raises(InputError) as raised:
        read(config_json(each.kind, **changes))
    message = str(raised.value)
    assert str(said) in message
    assert each.nearest in message or "give --sequence_length=16 or less" in message


@pytest.mark.parametrize("kind", TYPES)
def test_types_of_the_table_are_refused(kind):
    reason, nearest = TYPES[kind]
    assert nearest in FAMILIES and kind not in FAMILIES
    expected = re.escape(f"model_type is {kind!r} ({reason}); supported types are ")
    with pytest.raises(InputError, match=rf"^--input: {expected}.*, of which {nearest} comes near"):
        read({"model_type": kind})


def test_a_workdir_is_no_folder_of_transformers():
    with pytest.raises(InputError, match=r"has no model_type.* a run's workdir, export makes"):
        read({"model": {}, "train": {}})


def test_every_value_that_is_refused_by_a_list_is_in_the_table():
    only = {key for family in FAMILIES.values() for key in family.only}
    activations = {family.keys["activation"] for family in FAMILIES.values()}
    assert only | activations <= KEYS.keys()


def test_the_page_has_the_table():
    assert table() in (ROOT / "docs" / "huggingface.md").read_text("utf-8")
