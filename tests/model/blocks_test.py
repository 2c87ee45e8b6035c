"""The further block: what it computes, and the methods that verbs ask of blocks."""

import re
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from small_models import TOKENS, random_params, small

import t5x_diffeq as td
from t5x_diffeq.analysis.spectra import spectra
from t5x_diffeq.inference.sampling import Sampling, generate
from t5x_diffeq.model import plugin_checks
from t5x_diffeq.model.attention_block import TransformerBlock
from t5x_diffeq.model.block import Block
from t5x_diffeq.model.flops import step_flops
from t5x_diffeq.model.language_model import LanguageModel
from t5x_diffeq.model.layers.array_types import Places
from t5x_diffeq.model.layers.parameter import declare
from t5x_diffeq.model.plugin_checks import check_block
from t5x_diffeq.model.sub_fields import declared_leaves, has_method, make_block, need_methods
from t5x_diffeq.system.errors import InputError
from t5x_diffeq.training.objective import end_of_pass
from t5x_diffeq.training.setup import make_setup

PARALLEL = "t5x_diffeq.model.parallel_block:ParallelBlock"
BASELINE = {"weights": "per_layer", "scheme": "lie_trotter", "step_size": "1"}


class BareBlock(Block):
    """f and g alone, without an optional method."""

    def f(self, y, places, deterministic=True):
        return y

    def g(self, y, deterministic=True):
        return y


class WithoutF(Block):
    """g alone."""

    def g(self, y, deterministic=True):
        return y


class Narrow(BareBlock):
    """An f of another width than the state's."""

    def f(self, y, places, deterministic=True):
        return y[..., :3]


class Broken(BareBlock):
    """A g that raises."""

    def g(self, y, deterministic=True):
        return y @ y


class WithoutPlaces(BareBlock):
    """An f that doesn't take the places."""

    def f(self, y, deterministic=True):
        return y


class Needs(BareBlock):
    """Its needs have no values."""

    needs = ["qk_norm"]  # noqa: RUF012


class Scopes(BareBlock):
    """One name for f and g."""

    scopes = "attn"


class Reads(BareBlock):
    """An f or g that reads other tokens than it may, or learns nothing, as `what` says."""

    what: str = ""

    @nn.compact
    def f(self, y, places, deterministic=True):
        scale = declare(self, "scale", nn.initializers.ones, (y.shape[-1],), (None,), "scale")
        if self.what == "nothing":
            scale = jax.lax.stop_gradient(scale)
        if self.what == "later tokens":
            return scale * jnp.roll(y, -1, 1)
        if self.what == "the token before":
            return scale * jnp.pad(y, ((0, 0), (1, 0), (0, 0)))[:, :-1]
        if self.what == "the state":
            return y + scale * y
        return scale * (jnp.cumsum(y, 1) if self.what == "other documents" else y)

    def g(self, y, deterministic=True):
        return jnp.cumsum(y, 1) if self.what == "other tokens" else y


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("WithoutPlaces", "has a method f that can't be traced: TypeError: .*"),
        ("Reads(what='later tokens')", "has an f whose value at a token depends on later tokens"),
        ("Reads(what='other documents')", "has an f whose .* on another document of the row; .*"),
        ("Reads(what='the token before')", "has an f whose .* on another document of the row; .*"),
        ("Needs", r"its needs are \['qk_norm'\]; they must be a dict of keys of .*"),
        ("Scopes", "its scopes are 'attn'; they must be two names, .*"),
        ("Reads(what='other tokens')", "has a g whose value at a token depends on other tokens"),
        ("Reads(what='nothing')", "has a parameter scale without a gradient"),
        ("WithoutF", "has no f; docs/extending.md says what a block needs"),
        ("Narrow", r"has a method f that returns \[1, 10, 3\] for a state \[1, 10, 16\]"),
        ("Broken", "has a method g that can't be traced: TypeError: .*"),
    ],
)
def test_a_faulty_block_is_refused_before_the_run(kind, message):
    name = f"{__name__}:{kind}"
    with pytest.raises(InputError, match=f"^model.block={re.escape(name)}:? {message}$"):
        check_block(small(block=name).config)
    check_block(small(block=f"{__name__}:BareBlock").config)
    check_block(small(block=f"{__name__}:Reads").config)
    check_block(small(block=PARALLEL).config)


def test_a_block_that_adds_the_state_gets_a_note(capsys):
    check_block(small(block=f"{__name__}:Reads(what='the state')").config)
    assert "its f adds the state to its value, and so does the scheme" in capsys.readouterr().err
    check_block(small(block=f"{__name__}:Reads").config)
    check_block(small(block=PARALLEL).config)
    assert "its f adds" not in capsys.readouterr().err


class Gain(nn.Module):
    """A layer that isn't a `Linear`."""

    @nn.compact
    def __call__(self, y):
        return y * declare(self, "scale", nn.initializers.ones, (y.shape[-1],), (None,), "scale")


class WithGain(BareBlock):
    """A block whose one layer can't have adapters."""

    def setup(self):
        self.gain = Gain()

    def f(self, y, places, deterministic=True):
        return self.gain(y)


def test_a_block_without_linears_has_no_adapters():
    config = small(block=f"{__name__}:WithGain", weights="per_layer", adapter_rank=2).config
    with pytest.raises(InputError, match=r"this block has none of t5x_diffeq's \(Linear\); set"):
        LanguageModel(config).init(jax.random.key(0), jnp.zeros((1, 4), jnp.int32))


class NotSmall(BareBlock):
    """A block that takes no small width."""

    def f(self, y, places, deterministic=True):
        assert y.shape[-1] == 16
        return y


class NotSmallAndReadsAhead(NotSmall):
    """One whose f reads later tokens."""

    def f(self, y, places, deterministic=True):
        return jnp.flip(super().f(y, places), 1)


def test_a_block_that_takes_no_small_sizes_is_checked_at_its_own(capsys, monkeypatch):
    """Unless these are large, which is said."""
    check_block(small(block=f"{__name__}:NotSmall").config)
    with pytest.raises(InputError, match="has an f whose value at a token depends on"):
        check_block(small(block=f"{__name__}:NotSmallAndReadsAhead").config)
    assert not capsys.readouterr().err
    monkeypatch.setattr(plugin_checks, "_MOST_CHANNELS", 8)
    check_block(small(block=f"{__name__}:NotSmall").config)
    assert (
        "NotSmall: which tokens it reads isn't checked: AssertionError" in capsys.readouterr().err
    )


class WithDense(BareBlock):
    """A layer of Flax, whose parameters have no roles."""

    def setup(self):
        self.dense = nn.Dense(self.config.embed_dim)

    def f(self, y, places, deterministic=True):
        return self.dense(y)


class Needy(BareBlock):
    """Needs a key that doesn't exist."""

    needs: ClassVar = {"qk_nrm": "none"}


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("BareBlock", "has no parameters, so there is nothing to train"),
        ("WithDense", "the parameter dense/.* is of the role None; .* such as Linear for nn.Dense"),
        ("Needy", "model.block=.*Needy needs model.qk_nrm, which is no key"),
    ],
)
def test_a_block_whose_weights_no_source_makes(kind, message):
    with pytest.raises(InputError, match=message):
        declared_leaves(small(block=f"{__name__}:{kind}").config)


def test_a_run_checks_its_block():
    config = td.load_config("configs/tiny.py", {"model.block": f"{__name__}:WithoutF"})
    with pytest.raises(InputError, match="has no f"):
        make_setup(config, 256)


class WithOwnDropout(TransformerBlock):
    """A block whose dropout has a rate of its own."""

    def setup(self):
        super().setup()
        self.own_dropout = nn.Dropout(0.5)

    def g(self, y, deterministic=True):
        return self.own_dropout(super().g(y, deterministic), deterministic=deterministic)


def test_training_draws_a_blocks_own_dropout():
    model = small(block=f"{__name__}:WithOwnDropout")
    assert model.config.dropout_rate == 0
    params, batch = random_params(model), {"inputs": TOKENS}
    first, second, without = (
        end_of_pass(model, params, batch, key=key).y
        for key in (jax.random.key(0), jax.random.key(1), None)
    )
    assert (first != second).any() and (first != without).any()


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, BASELINE], ids=["ode", "baseline"])
def test_generation_with_a_cache_continues_the_sequence(changes):
    """Each token is the likeliest by the whole model's logits, with prompts of two lengths."""
    model = small(block=PARALLEL, max_length=24, **changes)
    params = random_params(model)
    prompts = [[3, 1, 4, 1, 5, 9, 2], [6, 5]]
    drawn = generate(model, params, prompts, 5, Sampling(temperature=0), jax.random.key(0))
    for row, added in zip(prompts, np.stack([*drawn], axis=1), strict=True):
        whole = jnp.asarray([[*row, *added]])
        logits = model.apply({"params": params}, whole)[0, len(row) - 1 : -1]
        np.testing.assert_array_equal(logits.argmax(-1), added)


@pytest.mark.slow
def test_a_token_sees_no_later_token_and_no_other_document():
    model = small(block=PARALLEL)
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


def test_flops_and_spectra():
    model = small(block=PARALLEL, dtype="float32")
    counted = step_flops(model.config, 2)
    assert counted.projections > 0 and counted.attention > 0 and counted.mlp > 0
    found = spectra(
        make_block(model.config), model.apply({"params": random_params(model)}, method="weights")
    )
    assert set(found) == {"qk", "ov", "mlp"} and all(np.isfinite(x).all() for x in found.values())
    assert found["qk"].shape == (3, 4, 4)


def test_a_block_without_a_method_is_refused_by_name():
    config = small(block=f"{__name__}:BareBlock").config
    assert not has_method(config, "extend")
    with pytest.raises(InputError, match="generation needs the method `extend` of the block"):
        need_methods(config, ("extend",))
    with pytest.raises(InputError, match="counting FLOPs needs the method `flops`"):
        step_flops(config, 2)


class CountsOnce(BareBlock):
    """Its `flops` returns a number."""

    def flops(self, length):
        return 100


def test_flops_are_those_of_f_and_of_g():
    with pytest.raises(InputError, match="flops returns 100; it must return two SubFieldFlops"):
        step_flops(small(block=f"{__name__}:CountsOnce").config, 2)


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ("nowhere.py:Block", "a module is named without .py, as in nowhere:Block"),
        ("nowhere:Block", "nowhere can't be imported .*No module named 'nowhere'.* PYTHONPATH"),
        (
            "t5x_diffeq.model.parallel_block:Block9",
            "has no Block9; it is .*, and has .*ParallelBlock",
        ),
        ("t5x_diffeq.model.config:ModelConfig", "is no subclass of .*Block; derive it"),
        (f"{PARALLEL}(size=3)", "can't be made: .*size"),
        (f"{PARALLEL}(3)", "can.t be made: multiple values for argument .config."),
    ],
)
def test_names_that_can_not_be_used(block, message):
    with pytest.raises(InputError, match=message):
        make_block(small(block=block).config)
