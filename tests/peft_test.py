"""Adapters in PEFT's layout: base and product together are the merged kernels."""

import json

import numpy as np
import pytest
from exported_models import ADAPTED, CLASSIC, random_run
from safetensors.numpy import load_file

from t5x_diffeq.hf.save_pretrained import save_pretrained
from t5x_diffeq.system.errors import InputError


@pytest.mark.slow
@pytest.mark.parametrize("name", ADAPTED)
def test_base_and_adapters_are_the_merged_model(tmp_path, name):
    run, tokenizer, as_run = random_run(ADAPTED[name])
    save_pretrained(run, as_run, tokenizer, [], tmp_path / "merged")
    save_pretrained(run, as_run, tokenizer, [], tmp_path / "apart", peft=True)
    base, merged = (load_file(tmp_path / f / "model.safetensors") for f in ("apart", "merged"))
    factors = load_file(tmp_path / "apart/adapter/adapter_model.safetensors")
    config = json.loads((tmp_path / "apart/adapter/adapter_config.json").read_text())
    assert base.keys() == merged.keys()
    scaling, adapted = config["lora_alpha"] / config["r"], set()
    for key in (key for key in factors if key.endswith("lora_A.weight")):
        a, b = factors[key], factors[key.replace("lora_A", "lora_B")]
        assert a.shape[0] == b.shape[1] == config["r"] == 3
        module = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        assert any(module.endswith("." + target) for target in config["target_modules"])
        product = (b @ a).T if config["fan_in_fan_out"] else b @ a
        kernel = base[f"{module}.weight"] + scaling * product
        np.testing.assert_allclose(kernel, merged[f"{module}.weight"], rtol=1e-5, atol=1e-6)
        adapted.add(f"{module}.weight")
    assert len(adapted) == len(factors) // 2
    for key in base.keys() - adapted:
        np.testing.assert_array_equal(base[key], merged[key])
    assert all(
        any(key.endswith(f".{target}.weight") for key in adapted)
        for target in config["target_modules"]
    )


def test_a_run_without_adapters(tmp_path):
    run, tokenizer, as_run = random_run((CLASSIC, "bytes"))
    with pytest.raises(InputError, match="--peft needs a run with adapters"):
        save_pretrained(run, as_run, tokenizer, [], tmp_path / "out", peft=True)
    assert not (tmp_path / "out").exists()
