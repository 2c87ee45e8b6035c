"""The small files of adapters: read as they were written, or refused by the name of the array."""

import json
import shutil
from dataclasses import replace

import jax
import numpy as np
import pytest
from exported_models import ADAPTED, random_run

from t5x_diffeq.model.language_model import LanguageModel
from t5x_diffeq.system.errors import InputError
from t5x_diffeq.training.load import load_adapters, save_adapters

A, B = (f"adapters/attention.qkv/{name}" for name in "ab")
TABLE, BASE = "token_embedding/table", "source/weights/mlp/up/kernel"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run with adapters, and the folder of its adapters and embeddings."""
    run, _, config = random_run(ADAPTED["gpt_lora_of_two"])
    workdir = tmp_path_factory.mktemp("lora")
    save_adapters(config, run.params, ["adapters", "token_embedding"], workdir)
    return run, workdir / "adapters"


def load(run, folder):
    base = {name: part for name, part in run.params.items() if name != "adapters"}
    base["token_embedding"] = {"table": 0 * base["token_embedding"]["table"]}
    with run.placed.context():
        return load_adapters(folder, base, run.placed.abstract_params)


def test_adapters_come_back(saved):
    run, folder = saved
    jax.tree.map(np.testing.assert_array_equal, load(run, folder), run.params)


def without(*names):
    return lambda arrays: {name: x for name, x in arrays.items() if name not in names}


def changed(name, change):
    return lambda arrays: {**arrays, name: change(arrays[name])}


ARRAYS = {
    "NaN": (changed(A, lambda x: x * np.nan), f"{A} has values that aren't finite; restore"),
    "infinite": (changed(TABLE, lambda x: x / 0), f"{TABLE} has values that aren't finite"),
    "shape": (changed(A, lambda x: x[:, 1:]), rf"{A} is float32\[3, 15, 3\], and must be float32"),
    "one too many": (changed(TABLE, lambda x: x[None]), rf"{TABLE} is float32\[1, "),
    "complex": (changed(B, lambda x: x + 1j), f"{B} is complex64"),
    "float16": (changed(B, lambda x: x.astype(np.float16)), f"{B} is float16"),
    "whole numbers": (changed(B, lambda x: x.astype(int)), f"{B} is int64"),
    "objects": (changed(B, lambda x: np.array([{}])), "can't be read: Object arrays cannot be"),
    "missing": (without(B), f"{B} is missing"),
    "none": (lambda _: {}, "adapters/attention.qkv/a is missing"),
    "unknown": (lambda x: {**x, "adapters/mlp.gate/a": x[A]}, "mlp.gate/a is no part of this"),
    "the base's": (
        lambda x: {**x, BASE: np.zeros((3, 16, 40), np.float32)},
        "in adapters.npz, source/weights/.* is",
    ),
}


@pytest.mark.filterwarnings("ignore:divide by zero", "ignore:invalid value")
@pytest.mark.parametrize("what", ARRAYS)
def test_arrays_that_are_no_adapters(saved, tmp_path, what):
    """Even where the folder says that these are the arrays."""
    run, folder = saved
    change, message = ARRAYS[what]
    shutil.copytree(folder, tmp_path / "adapters")
    with np.load(folder / "adapters.npz") as arrays:
        np.savez(tmp_path / "adapters" / "adapters.npz", **change(dict(arrays)))
    with pytest.raises(InputError, match=r"can't be read: it isn't the file that adapters.json"):
        load(run, tmp_path / "adapters")
    facts = json.loads((folder / "adapters.json").read_text())
    (tmp_path / "adapters" / "adapters.json").write_text(json.dumps({**facts, "arrays": None}))
    with pytest.raises(InputError, match=message):
        load(run, tmp_path / "adapters")


@pytest.mark.parametrize("content", [b"", b"PK\3\4 cut off", b"\x93NUMPY"], ids=["", "zip", "npy"])
def test_files_that_hold_no_arrays(saved, tmp_path, content):
    run, folder = saved
    shutil.copytree(folder, tmp_path / "adapters")
    facts = json.loads((folder / "adapters.json").read_text())
    (tmp_path / "adapters" / "adapters.json").write_text(json.dumps({**facts, "arrays": None}))
    (tmp_path / "adapters" / "adapters.npz").write_bytes(content)
    with pytest.raises(InputError, match=r"adapters.npz can't be read: .*; restore the folder"):
        load(run, tmp_path / "adapters")
    (tmp_path / "adapters" / "adapters.npz").unlink()
    with pytest.raises(InputError, match=r"adapters.npz can't be read: No such file"):
        load(run, tmp_path / "adapters")


@pytest.mark.parametrize("facts", [{"norms": [1]}, {"norms": {"a": "x"}}, {"model": 3}])
def test_facts_that_are_none(saved, tmp_path, facts):
    run, folder = saved
    shutil.copytree(folder, tmp_path / "adapters")
    path = tmp_path / "adapters" / "adapters.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **facts}))
    with pytest.raises(InputError, match="holds no adapters"):
        load(run, tmp_path / "adapters")


def test_the_product_of_the_factors_is_scaled_by_alpha_over_r(saved):
    run, _ = saved
    config = replace(run.placed.model.config, dtype="float32", adapter_alpha=6.0)
    model, stored = LanguageModel(config), run.params["adapters"]
    made = model.apply({"params": run.params}, method="weights")["adapters"]
    factors = made["attention"]["qkv"]
    np.testing.assert_array_equal(factors["a"], stored["attention.qkv"]["a"])
    expected = 6.0 / config.adapter_rank * stored["attention.qkv"]["b"]
    np.testing.assert_allclose(factors["b"], expected, rtol=1e-6)
