"""FLOPs by formula are those that the compiler counts; MFU of devices that are known."""

import pytest

from configs import default
from t5x_diffeq.training.chips import chip
from t5x_diffeq.training.flops import PEAK_FLOPS, mfu, peak_flops, step_flops
from t5x_diffeq.training.setup import make_setup
from t5x_diffeq.training.step import unrolled_cost

BATCH = 16


def small(variant="ode", **model):
    config = default.set_variant(default.get_config(), variant)
    config.model.update(vocab_size=256, num_steps=2, embed_dim=128, num_heads=4, mlp_dim=512)
    config.model.update(time_embed_dim=4, num_frequencies=8, **model)
    config.data.sequence_length = 64
    config.data.cross_documents = True
    config.mesh.fsdp = 1
    return make_setup(config, 256)


@pytest.mark.parametrize(
    ("variant", "model"),
    [
        ("ode", {"architecture": "llama", "num_kv_heads": 2}),
        ("ode", {"architecture": "gpt", "scheme": "heun"}),
        ("baseline", {"architecture": "gpt"}),
    ],
)
def test_the_formula_is_what_the_compiler_counts(variant, model):
    setup = small(variant, **model)
    flops = step_flops(setup.model.config, BATCH)
    with setup.context():
        counted = unrolled_cost(setup, BATCH)["flops"]
    # XLA's attention computes the masked half too, and the loss makes its logits again backward.
    expected = flops.model + flops.attention + flops.head / 3 + flops.hypernetwork
    assert counted == pytest.approx(expected, rel=0.04)  # it counts sums and the optimizer too


def test_parts():
    ode, deep = (small(architecture="llama", num_steps=n).model.config for n in (2, 4))
    flops, twice = step_flops(ode, BATCH), step_flops(deep, BATCH)
    assert twice.mlp == 2 * flops.mlp == 2 * 3 * 2 * BATCH * 64 * 2 * 3 * 128 * 512
    assert flops.attention == 3 * 2 * 2 * BATCH * 64 * 64 * 128
    assert twice.hypernetwork == 2 * flops.hypernetwork
    assert step_flops(ode, 2 * BATCH).hypernetwork == flops.hypernetwork
    assert step_flops(small("baseline").model.config, BATCH).hypernetwork == 0


def test_what_is_computed_again():
    blocks = ("projections", "attention", "mlp")
    by_remat = {
        remat: step_flops(small(remat=remat).model.config, BATCH)
        for remat in ("none", "dots", "full", "every:2")
    }
    none, full = by_remat["none"], by_remat["full"]
    forward = sum(getattr(none, part) for part in blocks) / 3
    assert full.recomputed == none.recomputed + forward == by_remat["every:2"].recomputed
    assert by_remat["dots"].recomputed == none.recomputed + none.attention / 3
    assert none.recomputed == none.head / 3
    assert full.total - full.recomputed == none.model + none.hypernetwork


@pytest.mark.parametrize(
    ("kind", "peak"),
    [
        ("TPU v4", 275e12),
        ("TPU v5 lite", 197e12),
        ("TPU v5", 459e12),
        ("TPU v6 lite", 918e12),
        ("TPU7x", 1153.5e12),  # half a chip
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA B200", 2250e12),
    ],
)
def test_peaks(kind, peak):
    assert peak_flops(kind) == peak
    assert mfu(4 * peak, 2.0, 8, kind) == 0.25


@pytest.mark.parametrize("kind", ["cpu", "TPU v99", "NVIDIA H20", "NVIDIA RTX A1000"])
def test_an_unknown_kind_is_said(kind, capsys):
    assert chip(kind) is None and kind not in PEAK_FLOPS
    assert mfu(1e12, 1.0, 1, kind) is None
    assert f"device kind '{kind}' are not known" in capsys.readouterr().err
