"""FLOPs by formula are those that the compiler counts; MFU of devices that are known."""

from dataclasses import replace

import pytest
from helpers import setup_of
from small_models import EVERY_OPTION

from configs import default
from t5x_diffeq.config.config import Config
from t5x_diffeq.model.config import ModelConfig
from t5x_diffeq.model.flops import step_flops
from t5x_diffeq.planner.program_cost import product_flops
from t5x_diffeq.system.chips import GIB, chip
from t5x_diffeq.training.step import lower_train_step

BATCH = 16


def config_with(variant="ode", **model):
    config = default.set_variant(default.get_config(), variant)
    config.model.update(vocab_size=256, num_steps=2, embed_dim=128, num_heads=4, mlp_dim=512)
    config.model.update(time_embed_dim=4, num_frequencies=8, **model)
    config.data.sequence_length = 64
    config.data.cross_documents = True
    config.mesh.fsdp = 1
    return config


def small(variant="ode", **model):
    return setup_of(config_with(variant, **model))


def model_config(variant="ode", **model):
    """That of the model which `small` sets up."""
    keys = Config.of(config_with(variant, **model))
    return ModelConfig.of(keys.model, 256, 64).with_attention_for("cpu")[0]


def count(setup):
    return product_flops(lower_train_step(setup, BATCH).as_text(dialect="hlo"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "model"),
    [
        ("ode", {"architecture": "llama", "num_kv_heads": 2}),
        ("ode", {"architecture": "gpt", "scheme": "heun", "attention_time_embed_dim": 5}),
        ("ode", {"time_basis": "legendre:16", "time_embedding": "common"}),
        ("baseline", {"architecture": "gpt"}),
        ("baseline", {**EVERY_OPTION, "head_dim": 64}),
    ],
)
def test_the_formula_is_what_the_program_does(variant, model):
    setup = small(variant, remat="none", **model)
    flops = step_flops(setup.model.config, BATCH)
    # XLA's attention computes the masked half too.
    assert count(setup) == pytest.approx(flops.total + flops.attention, rel=0.002)


def test_parts():
    ode, deep = (model_config(architecture="llama", num_steps=n) for n in (2, 4))
    flops, twice = step_flops(ode, BATCH), step_flops(deep, BATCH)
    assert twice.mlp == 2 * flops.mlp == 2 * 3 * 2 * BATCH * 64 * 2 * 3 * 128 * 512
    assert flops.attention == 3 * 2 * 2 * BATCH * 64 * 64 * 128
    assert twice.hypernetwork == 2 * flops.hypernetwork
    assert step_flops(ode, 2 * BATCH).hypernetwork == flops.hypernetwork
    assert step_flops(model_config("baseline"), BATCH).hypernetwork == 0


def test_what_is_computed_again():
    blocks = ("projections", "attention", "mlp")
    by_remat = {
        remat: step_flops(model_config(remat=remat), BATCH) for remat in ("none", "dots", "full")
    }
    none, full = by_remat["none"], by_remat["full"]
    forward = sum(getattr(none, part) for part in blocks) / 3
    assert full.recomputed < none.recomputed + forward  # what writes to the stream isn't needed
    assert by_remat["dots"].recomputed == none.recomputed + none.attention / 3
    assert none.recomputed == 0
    assert full.total - full.recomputed == none.model + none.hypernetwork


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["ode", "baseline"])
@pytest.mark.parametrize("remat", ["full", "keep:qkv", "keep:attention,mlp"])
def test_what_is_computed_again_as_the_program_does(variant, remat):
    with_remat, without = (small(variant, architecture="llama", remat=r) for r in (remat, "none"))
    again = step_flops(with_remat.model.config, BATCH).recomputed
    assert count(with_remat) - count(without) == pytest.approx(again, rel=0.1)


def test_a_kernel_computes_whole_blocks():
    """Of 2 x 2 blocks 3 are visited, where half is needed; and 7 products backward."""
    config = model_config(architecture="llama", remat="none", num_heads=1)
    long = replace(config, max_length=2048, attention="splash")
    needed = step_flops(long, BATCH).attention / 3
    assert step_flops(long, BATCH).attention_kernels == needed * 1.5 * (1 + 7 / 2)
    apart = step_flops(replace(long, attention="splash:128"), BATCH).attention_kernels
    assert apart == needed * (1 + 1 / 16) * (1 + 7 / 2)
    narrow = replace(long, num_heads=2)  # 64 wide, of 128 lanes
    assert step_flops(narrow, BATCH).attention_kernels == 2 * needed * 1.5 * (1 + 7 / 2)
    again = replace(long, remat="keep:qkv"), replace(long, remat="keep:attention")
    ratio = [step_flops(c, BATCH).attention_kernels / needed / 1.5 for c in again]
    assert ratio == [2 + 7 / 2, 1 + 7 / 2]


@pytest.mark.parametrize(
    ("kind", "peak", "memory"),
    [
        ("TPU v5 lite", 197e12, 15.75 * GIB),
        ("NVIDIA A100-SXM4-40GB", 312e12, 40e9),
        ("NVIDIA A100-SXM4-80GB", 312e12, 80e9),
        ("NVIDIA H100 80GB HBM3", 989e12, 80e9),
        ("NVIDIA H100 PCIe", 756e12, 80e9),
        ("NVIDIA H100 NVL", 835e12, 94e9),
        ("NVIDIA H200", 989e12, 141e9),
        ("NVIDIA GH200 480GB", 989e12, 96e9),
        ("NVIDIA GB200", 2500e12, 186e9),
        ("NVIDIA L40S", 362e12, 48e9),
        ("NVIDIA GeForce RTX 4090", 165.2e12, 24e9),
    ],
)
def test_chips_by_the_names_of_jax(kind, peak, memory):
    figures = chip(kind)
    assert (figures.peak_flops, figures.memory_bytes) == (peak, memory)


def test_a_part_of_a_chip_is_another_kind():
    """A name that has a known one in it says nothing of its peak or its memory."""
    assert chip("NVIDIA H100 80GB HBM3 MIG 1g.10gb") is None
    assert chip("NVIDIA H100") is None
