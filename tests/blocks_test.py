"""The further blocks: what they compute, and the methods that verbs ask of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import auto_mesh, rules_of, setup_of, small_config, train_keys
from small_models import TOKENS, random_params, small

from configs import default
from t5x_diffeq.analysis.spectra import spectra
from t5x_diffeq.blocks import mixture_of_experts
from t5x_diffeq.inference.sampling import Sampling, generate
from t5x_diffeq.layers.array_types import Places
from t5x_diffeq.models.block import Block
from t5x_diffeq.models.sub_fields import has_method, make_block, need_methods
from t5x_diffeq.planner.flops import step_flops
from t5x_diffeq.runtime.errors import InputError
from t5x_diffeq.training.partitioning import mesh_context
from t5x_diffeq.training.step import make_gradient

PARALLEL = "t5x_diffeq.blocks.parallel:ParallelBlock"
MIXTURE = "t5x_diffeq.blocks.mixture_of_experts:MixtureBlock(num_experts=4)"
BLOCKS = (PARALLEL, MIXTURE)
BASELINE = {"weights": "per_layer", "scheme": "lie_trotter", "step_size": "1"}
RULES = rules_of(default.get_config())


class BareBlock(Block):
    """f and g alone, without an optional method."""

    def f(self, y, places, deterministic=True):
        return y

    def g(self, y, deterministic=True):
        return y


@pytest.mark.slow
def test_a_mixture_is_the_sum_over_each_tokens_experts():
    model = small(block=MIXTURE, weights="shared")
    block = make_block(model.config)
    W = random_params(model)["source"]["weights"]
    y = jax.random.normal(jax.random.key(1), (2, 10, 16))
    found = block.apply({"params": W}, y, method="g")
    x = np.asarray(block.apply({"params": W}, y, method=lambda block, y: block.mlp_norm(y)))
    logits = x @ W["router"]["kernel"]
    p = np.exp(logits - logits.max(-1, keepdims=True))
    expected = np.zeros_like(x)
    for row, token in np.ndindex(x.shape[:2]):
        best = np.argsort(-p[row, token])[:2]
        for e in best:
            gate, up, down = (np.asarray(W["experts"][name][e]) for name in ("gate", "up", "down"))
            hidden = x[row, token] @ gate
            output = (hidden / (1 + np.exp(-hidden)) * (x[row, token] @ up)) @ down
            expected[row, token] += p[row, token, e] / p[row, token, best].sum() * output
    np.testing.assert_allclose(found, expected, atol=2e-5)


def test_the_imbalance_is_one_if_even_and_e_at_worst():
    even = jnp.full((1, 4, 4), 0.25)
    chosen = jnp.arange(4)[None, :, None]
    assert mixture_of_experts.imbalance(even, chosen) == pytest.approx(1)
    one = jax.nn.one_hot(jnp.zeros((1, 4), int), 4)
    assert mixture_of_experts.imbalance(one, jnp.zeros((1, 4, 1), int)) == pytest.approx(4)


def gradient_of(model, params, batch, microbatches=1):
    keys = train_keys(microbatches=microbatches, loss_chunk=64)
    of_batch = make_gradient(model, lambda part: True, keys)
    gradient, _, means, *_ = jax.jit(of_batch)(params, batch, jax.random.key(0))
    return gradient, means


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, BASELINE, {"scheme": "midpoint"}])
def test_the_running_cost_is_the_mean_over_depth(changes, monkeypatch):
    """A constant rate is its own mean, for any step size and scheme."""
    monkeypatch.setattr(mixture_of_experts, "imbalance", lambda p, chosen: jnp.float32(3))
    model = small(block=MIXTURE[:-1] + ", balance=0.5)", **changes)
    _, _, costs = model.apply({"params": random_params(model)}, TOKENS, method="state_and_head")
    assert costs.block == pytest.approx(1.5)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"fsdp": 4}, {"fsdp": 2, "expert": 2}])
def test_a_mixture_is_initialised_on_a_mesh(mesh, tmp_path):
    config = small_config(tmp_path)
    config.model.block = MIXTURE
    config.mesh.update(mesh)
    setup = setup_of(config, devices=jax.devices()[:4])
    with setup.context():
        up = setup.init_state().params["source"]["experts"]["up"]
    assert tuple(up.sharding.spec)[1:3] == ("expert", "fsdp")


def test_a_mixture_refuses_rules_that_split_its_width_as_the_batch():
    model = small(block=MIXTURE)
    rules = rules_of(default.get_config())
    rules = (*(rule for rule in rules if rule[0] not in ("mlp", "embed")), ("mlp", "fsdp"))
    with (
        mesh_context(auto_mesh(fsdp=2), rules),
        pytest.raises(InputError, match="'mlp' lies on fsdp"),
    ):
        jax.eval_shape(model.apply, {"params": random_params(model)}, TOKENS)


def batch_of(rows=8):
    tokens = np.random.default_rng(3).integers(0, 50, (rows, 11)).astype(np.int32)
    segments = np.broadcast_to((np.arange(10) > 5).astype(np.int32), (rows, 10))
    positions = np.broadcast_to(np.arange(10) % 6, (rows, 10)).astype(np.int32)
    return {
        "inputs": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "mask": np.ones((rows, 10), np.float32),
        "segments": segments,
        "positions": positions,
    }


@pytest.mark.slow
def test_a_mesh_computes_what_one_device_does():
    """Loss and every gradient, with the experts on an axis of their own."""
    model = small(block=MIXTURE)
    params, batch = random_params(model), batch_of()
    alone = gradient_of(model, params, batch)
    mesh = auto_mesh(fsdp=2, expert=2, tensor=2)
    with mesh_context(mesh, RULES):
        split = gradient_of(model, params, batch)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), split[1], alone[1])
    largest = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(alone[0]))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5 * largest), split[0], alone[0]
    )


@pytest.mark.slow
def test_the_running_cost_is_in_the_gradient_and_not_in_the_loss():
    """It is the mean over depth, whatever the step size, and over microbatches."""
    of_router = {}
    for balance, microbatches in ((0.0, 1), (0.5, 1), (0.5, 2)):
        model = small(block=MIXTURE[:-1] + f", balance={balance})", **BASELINE)
        params = random_params(model)
        gradient, means = gradient_of(model, params, batch_of(), microbatches)
        router = gradient["source"]["weights"]["router"]["kernel"]
        of_router[balance, microbatches] = means["loss"], router
    without, whole, halves = of_router.values()
    np.testing.assert_allclose([whole[0], halves[0]], without[0], rtol=1e-6)
    assert jnp.abs(whole[1] - without[1]).max() > 1e-4
    assert jnp.abs(halves[1] - whole[1]).max() < jnp.abs(whole[1] - without[1]).max()
    assert 0.5 <= means["running_cost"] <= 0.5 * 4  # the imbalance of four experts is from 1 to 4


@pytest.mark.slow
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("changes", [{}, BASELINE], ids=["ode", "baseline"])
def test_generation_with_a_cache_continues_the_sequence(block, changes):
    """Each token is the likeliest by the whole model's logits, with prompts of two lengths."""
    model = small(block=block, max_length=24, **changes)
    params = random_params(model)
    prompts = [[3, 1, 4, 1, 5, 9, 2], [6, 5]]
    drawn = generate(model, params, prompts, 5, Sampling(temperature=0), jax.random.key(0))
    for row, added in zip(prompts, np.stack([*drawn], axis=1), strict=True):
        whole = jnp.asarray([[*row, *added]])
        logits = model.apply({"params": params}, whole)[0, len(row) - 1 : -1]
        np.testing.assert_array_equal(logits.argmax(-1), added)


@pytest.mark.slow
@pytest.mark.parametrize("block", BLOCKS)
def test_a_token_sees_no_later_token_and_no_other_document(block):
    model = small(block=block)
    params = random_params(model)
    places = Places(
        jnp.asarray([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5]] * 2), jnp.asarray([[0] * 4 + [1] * 6] * 2)
    )

    def hidden(tokens):
        y, _, _ = model.apply({"params": params}, tokens, None, places, method="state_and_head")
        return y

    def change(token):
        changed = hidden(TOKENS.at[:, token].add(1))
        return np.asarray(jnp.abs(changed - hidden(TOKENS)).max((0, 2)))

    assert (change(6)[:6] < 1e-5).all() and (change(6)[6:] > 1e-4).all()
    assert (change(2)[4:] < 1e-5).all() and (change(2)[2:4] > 1e-4).all()


@pytest.mark.parametrize("block", BLOCKS)
def test_flops_and_spectra(block):
    model = small(block=block, dtype="float32")
    counted = step_flops(model.config, 2)
    assert counted.projections > 0 and counted.attention > 0 and counted.mlp > 0
    found = spectra(
        make_block(model.config), model.apply({"params": random_params(model)}, method="weights")
    )
    assert set(found) == {"qk", "ov", "mlp"} and all(np.isfinite(x).all() for x in found.values())
    assert found["qk"].shape == (3, 4, 4)


def test_a_token_uses_only_its_experts():
    """The FLOPs of two of eight experts, and those of the router."""
    c = small(block=MIXTURE).config
    _, g = make_block(c).flops(c.max_length)
    assert g.products == 2 * (c.embed_dim * 4 + 2 * 3 * c.embed_dim * c.mlp_dim)


def test_a_block_without_a_method_is_refused_by_name():
    config = small(block=f"{__name__}:BareBlock").config
    assert not has_method(config, "extend")
    with pytest.raises(InputError, match="generation needs the method `extend` of the block"):
        need_methods(config, ("extend",))
    with pytest.raises(InputError, match="counting FLOPs needs the method `flops`"):
        step_flops(config, 2)


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ("nowhere:Block", "nowhere can't be imported .*No module named 'nowhere'.* PYTHONPATH"),
        ("t5x_diffeq.blocks.parallel:Block9", "has no Block9; it has .*ParallelBlock"),
        ("t5x_diffeq.models.config:ModelConfig", "can't be made|is not a block"),
        (f"{PARALLEL}(size=3)", "can't be made: .*size"),
        (f"{PARALLEL}(3)", "must be keywords with literal values"),
    ],
)
def test_names_that_can_not_be_used(block, message):
    with pytest.raises(InputError, match=message):
        make_block(small(block=block).config)
