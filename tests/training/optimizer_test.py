"""What decays, what is scaled, the schedules, and how the step is compiled."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.traverse_util import flatten_dict
from helpers import setup_of
from small_models import SMALL

from t5x_diffeq.checkpoints.workdir import check_config, save_config
from t5x_diffeq.config.config import Config, OptimizerKeys
from t5x_diffeq.model.language_model import LanguageModel
from t5x_diffeq.model.layers.parameter import is_parameter
from t5x_diffeq.system.errors import InputError
from t5x_diffeq.training.optimizers.optimizer import (
    _clip,
    make_optimizer,
)
from t5x_diffeq.training.optimizers.schedule import learning_rate_schedule
from t5x_diffeq.training.partitioning import unbox
from t5x_diffeq.training.placed_model import declared_params
from t5x_diffeq.training.step import lower_train_step
from t5x_diffeq.training.tracking.jsonl import read_metrics


def constant_rate(rate):
    keys = {"learning_rate": rate, "schedule": "wsd", "cooldown_steps": 0, "warmup_fraction": 0.0}
    return learning_rate_schedule(OptimizerKeys(**keys), 1)


def updates(optimizer, gradient):
    """The update of every parameter, all 1, at learning rate 1."""
    declared = declared_params(LanguageModel(SMALL))
    transform = make_optimizer(OptimizerKeys(**optimizer), declared)
    params = jax.tree.map(lambda x: jnp.ones(x.shape), unbox(declared))
    gradients = jax.tree.map(lambda x: jnp.full(x.shape, gradient), params)
    extra = {"norm": jnp.float32(0.5), "schedule": constant_rate(1.0)}
    found = jax.jit(lambda g, p: transform.update(g, transform.init(p), p, **extra)[0])(
        gradients, params
    )
    return declared, flatten_dict(found, sep="/")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("decay", "decayed"),
    [
        ("embeddings", {"token_embedding/table", "position_embedding/table"}),
        ("kernels", {"source/mlp.up/kernel", "source/mlp.up/kernel_base", "token_embedding/table"}),
        ("all", {"source/mlp.up/bias", "final_norm/scale", "source/mlp_norm/shift"}),
    ],
)
def test_decay(small, decay, decayed):
    small.optimizer.decay = decay
    _, found = updates(small.optimizer, gradient=0.0)
    moved = {name for name, update in found.items() if (update != 0).all()}
    assert decayed <= moved
    spared = {"source/mlp.up/time_embedding/hidden_bias", "final_norm/scale"}
    assert decay == "all" or not spared & moved
    assert decay != "embeddings" or moved == decayed


@pytest.mark.slow
def test_steps_are_scaled_by_their_multipliers(small):
    small.optimizer.weight_decay = 0.0
    declared, found = updates(small.optimizer, gradient=1e-3)
    boxes = flatten_dict(declared, is_leaf=lambda _, x: is_parameter(x), sep="/")
    for name, update in found.items():
        expected = -boxes[name].step_multiplier
        assert float(update.ravel()[0]) == pytest.approx(expected, rel=1e-3), name
    assert boxes["source/mlp.up/kernel"].step_multiplier == 0.5 / SMALL.time_embed_dim
    assert boxes["source/mlp.up/kernel_base"].step_multiplier == 0.5


def test_schedule(small):
    small.optimizer.update(learning_rate=1.0, warmup_fraction=0.1, end_lr_fraction=0.1)
    rate = learning_rate_schedule(Config.of(small).optimizer, 100)
    assert 0 < float(rate(0)) < float(rate(5)) < float(rate(10)) == 1
    same = optax.warmup_cosine_decay_schedule(1 / 11, 1.0, 10, 100, 0.1)
    steps = range(0, 120, 5)
    np.testing.assert_allclose([rate(n) for n in steps], [same(n) for n in steps], rtol=1e-6)


def wsd(small, total_steps, **keys):
    """The rate at each step of a run, at a peak of 1."""
    keys = {"learning_rate": 1.0, "end_lr_fraction": 0.1, "warmup_fraction": 0.0, **keys}
    small.optimizer.update(schedule="wsd", **keys)
    rate = learning_rate_schedule(Config.of(small).optimizer, total_steps)
    return np.asarray([rate(jnp.int32(step)) for step in range(total_steps + 1)])


def test_warmup_stable_decay(small):
    rates = wsd(small, 100, warmup_fraction=0.1)
    np.testing.assert_allclose(rates[:11], np.arange(1, 12) / 11, rtol=1e-6)
    assert (rates[10:81] == 1).all()
    np.testing.assert_allclose(rates[80:], 1 - 0.9 * np.arange(21) / 20, rtol=1e-6)
    assert (wsd(small, 100, cooldown_steps=0) == 1).all()
    assert wsd(small, 100, cooldown_steps=100)[50] == pytest.approx(0.55)


def test_a_branch_goes_on_at_exactly_the_same_rate(small):
    """Until its cooldown, whatever the length of either run."""
    stable = wsd(small, 1000, warmup_fraction=0.01, learning_rate=3e-4)
    branch = wsd(small, 500, warmup_fraction=0.02, cooldown_steps=60, learning_rate=3e-4)
    np.testing.assert_array_equal(branch[:441], stable[:441])
    assert branch[441] < stable[441]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"schedule": "wsd", "warmup_fraction": 0.5, "cooldown_steps": 60},
            r"50 steps of warm-up .*=0.5\) and 60 of cooldown .*=60\) are more than .*=100; make",
        ),
        (
            {"schedule": "wsd", "warmup_fraction": 0.9},
            r"90 steps of warm-up .* and 20 of cooldown .*cooldown_steps=None",
        ),
        ({"cooldown_steps": 10}, r"cooldown_steps is 10, but optimizer.schedule=cosine has no"),
    ],
)
def test_schedules_that_contradict_themselves(small, keys, message):
    small.optimizer.update(keys)
    with pytest.raises(InputError, match=message):
        learning_rate_schedule(Config.of(small).optimizer, 100)


def test_a_running_run_may_cool_down_earlier(small, tmp_path):
    """But it can't change its schedule or its optimizer."""
    small.optimizer.schedule = "wsd"
    save_config(Config.of(small), tmp_path, "run")
    small.optimizer.cooldown_steps = 3
    assert not check_config(Config.of(small), tmp_path)
    for key, other in (("schedule", "cosine"), ("name", "muon"), ("role_multipliers", ())):
        changed = small.copy_and_resolve_references()
        changed.optimizer[key] = other if key != "role_multipliers" else (("bias", 2.0),)
        with pytest.raises(InputError, match=f"optimizer.{key} was"):
            check_config(Config.of(changed), tmp_path)


def test_the_factor_of_a_role_scales_steps_and_decay(small):
    """Beside the parameter's own multiplier, and after it."""
    small.optimizer.decay = "all"
    declared, plain = updates(small.optimizer, gradient=1e-3)
    small.optimizer.role_multipliers = (("kernel", 3.0), ("scale", 0.5))
    _, scaled = updates(small.optimizer, gradient=1e-3)
    boxes = flatten_dict(declared, is_leaf=lambda _, x: is_parameter(x), sep="/")
    factors = {"kernel": 3.0, "scale": 0.5}
    for name, update in scaled.items():
        factor = factors.get(boxes[name].role, 1.0)
        np.testing.assert_allclose(update, factor * plain[name], rtol=1e-6, err_msg=name)
    assert boxes["source/mlp.up/kernel"].step_multiplier != 1


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ((("kernels", 2.0),), r"has \('kernels', 2.0\); an entry is a role .* roles are kernel, b"),
        ((("kernel", -1),), r"has \('kernel', -1\); a factor is a number of at least 0"),
        ((("bias", 2.0), ("bias", 3.0)), r"has \('bias', 3.0\); name a role once"),
    ],
)
def test_bad_factors_of_roles(small, pairs, message):
    small.optimizer.role_multipliers = pairs
    with pytest.raises(InputError, match=message):
        updates(small.optimizer, gradient=0.0)


@pytest.mark.parametrize("shape", ["cosine", "wsd"])
def test_runs_that_differ_in_rate_length_and_seed_share_a_program(small, shape):
    def program(**keys):
        config = small.copy_and_resolve_references()
        config.optimizer.schedule = shape
        config.update_from_flattened_dict(keys)
        setup = setup_of(config)
        with setup.context():
            return lower_train_step(setup, config.train.batch_size).as_text()

    keys = {"optimizer.learning_rate": 0.5, "optimizer.warmup_fraction": 0.5, "seed": 7}
    first = program()
    assert program(**keys, **{"train.total_steps": 9}) == first
    assert program(**{"optimizer.weight_decay": 0.9}) != first


def test_a_step_on_cpus_replaces_adams_moments_in_place(small):
    """By default XLA copies them first, and those of P are most of what a step touches."""
    setup = setup_of(small)
    with setup.context():
        program = lower_train_step(setup, small.train.batch_size).compile().as_text()
    moments = re.findall(r"%(\S+) = .* parameter\(.*\[1\]\.[mn]u\[.*source.*kernel.*", program)
    copied = re.findall(r" copy\(%([^)]+)\)", program)
    assert len(moments) >= 8
    assert not set(moments) & set(copied)


@pytest.mark.parametrize(("norm", "factor"), [(0.5, 1.0), (4.0, 0.5)])
def test_a_gradient_is_scaled_down_to_the_largest_norm(norm, factor):
    clip = _clip(2.0)
    found, _ = clip.update({"w": jnp.ones(3)}, clip.init({}), {}, norm=jnp.float32(norm))
    np.testing.assert_array_equal(found["w"], factor)


def test_each_step_reports_the_rate_that_it_took(finished):
    config, workdir = Config.of(finished[0]), finished[1]
    schedule = learning_rate_schedule(config.optimizer, config.train.total_steps)
    rates = [line["train/learning_rate"] for line in read_metrics(workdir, "train/learning_rate")]
    np.testing.assert_allclose(rates, [schedule(step) for step in range(6)], rtol=1e-6)


def whole_adam(config, declared) -> optax.GradientTransformation:
    return optax.adam(1e-3)


def directions(config, declared) -> optax.GradientTransformation:
    return optax.scale_by_adam()


def longer(config, declared) -> optax.GradientTransformation:
    """An axis is added to every update."""
    return optax.stateless(lambda updates, params: jax.tree.map(lambda u: u[None], updates))


def failing(config, declared) -> optax.GradientTransformation:
    return optax.stateless(lambda updates, params: updates["no such part"])


def test_an_optimizer_whose_updates_dont_fit_is_refused():
    declared = declared_params(LanguageModel(SMALL))
    with pytest.raises(InputError, match="longer returns updates of other shapes than the grad"):
        make_optimizer(OptimizerKeys(name=f"{__name__}:longer"), declared)
    with pytest.raises(InputError, match=r"failing makes no updates: KeyError: 'no such part' \("):
        make_optimizer(OptimizerKeys(name=f"{__name__}:failing"), declared)


def test_an_optimizer_that_goes_uphill_is_refused():
    declared = declared_params(LanguageModel(SMALL))
    make_optimizer(OptimizerKeys(name=f"{__name__}:directions"), declared)
    with pytest.raises(
        InputError, match=r"updates against the gradient, .* such as optax\.scale_by_adam"
    ):
        make_optimizer(OptimizerKeys(name=f"{__name__}:whole_adam"), declared)
