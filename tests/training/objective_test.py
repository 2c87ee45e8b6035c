"""Depths that read their own rows and learn from the largest, and the penalty of the velocity."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, auto_mesh, train_config
from small_models import random_params, uneven_batch
from small_models import small as small_model

from t5x_diffeq.cli.train import train_to_end
from t5x_diffeq.config.config import Config
from t5x_diffeq.model.ode.integrate import integrate
from t5x_diffeq.model.ode.running_cost import StateWithCost, charge
from t5x_diffeq.model.ode.solvers import VectorField, grid
from t5x_diffeq.training.load import load_run
from t5x_diffeq.training.partitioning import mesh_context
from t5x_diffeq.training.step import make_gradient
from t5x_diffeq.training.terms import VelocityPenalty
from t5x_diffeq.training.tracking.jsonl import read_metrics

BATCH = uneven_batch(np.random.default_rng(0), 16)
PENALTY, SHARE = 0.3, 0.75
RULES = (
    ("batch", "fsdp"),
    ("length", "context"),
    ("embed", "fsdp"),
    ("vocab", "tensor"),
    ("mlp", "tensor"),
)


def gradient(model, depths=None, mesh=None, **keys):
    of_batch = make_gradient(model, lambda part: True, train_config(loss_chunk=32, **keys), depths)
    arguments = random_params(model), BATCH, jax.random.key(0)
    if mesh is None:
        found = jax.jit(of_batch)(*arguments)
    else:
        with mesh_context(auto_mesh(**mesh), RULES):
            found = jax.jit(of_batch)(*arguments)
    return found.gradient, found.metrics


def plain(model, rows_of):
    """The objective and its means from all logits and states, in the words of the config's keys.

    `rows_of` has the rows that each depth reads; the last depth is the teacher of the others.
    """
    largest = model.at_depth(max(rows_of))

    def probabilities(model, params):
        logits = model.apply({"params": params}, BATCH["inputs"])[..., :50]
        return jax.nn.log_softmax(logits)

    def whole(params):
        objectives, means = [], {"loss": [], "distillation": [], "velocity": []}
        theirs = jax.lax.stop_gradient(probabilities(largest, params))
        read = sum(map(len, rows_of.values()))
        for depth, rows in rows_of.items():
            at_depth, mask = model.at_depth(depth), BATCH["mask"][rows]

            def mean(x, mask=mask, rows=rows):
                return (x[rows] * mask).sum() / mask.sum()

            ours = probabilities(at_depth, params)
            picked = jnp.take_along_axis(ours, BATCH["targets"][..., None], -1)[..., 0]
            weights = at_depth.apply({"params": params}, method="weights")
            states = at_depth.apply(
                {"params": params}, BATCH["inputs"], weights, method="trajectory"
            )
            squares = jnp.square(jnp.diff(states, axis=0) * depth).mean((0, -1))  # F = dy / dt
            loss, velocity = mean(-picked), mean(squares)
            divergence = mean((jnp.exp(theirs) * (theirs - ours)).sum(-1))
            means["loss"].append(loss)
            means["velocity"].append(velocity)
            share = 0
            if depth < max(rows_of):
                means["distillation"].append(divergence)
                share = SHARE
            objective = (1 - share) * loss + share * divergence + PENALTY * velocity
            objectives.append(len(rows) / read * objective)
        means = {name: jnp.stack(x).mean() for name, x in means.items() if x}
        return sum(objectives), means

    return jax.jit(jax.grad(whole, has_aux=True))(random_params(model))


KEYS = {"depths_distill": SHARE, "depths_rows": "every:2", "velocity_penalty": PENALTY}


def test_the_gradient_is_that_of_the_loss_and_the_penalty():
    model = small_model(num_steps=2)
    expected, means = plain(model, {model.config.num_steps: np.arange(16)})
    found, same_means = gradient(model, velocity_penalty=PENALTY)
    for name, value in means.items():
        np.testing.assert_allclose(same_means[name], value, rtol=1e-5)
    assert_close(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize(("microbatches", "mesh"), [(2, None), (1, {"fsdp": 4, "tensor": 2})])
def test_smaller_depths_learn_from_the_largest_on_some_rows(microbatches, mesh):
    """Row r goes to microbatch r modulo M, of which each smaller depth reads every second row."""
    rows = np.arange(16).reshape(-1, 2, microbatches)
    rows_of = {2: rows[:, 0].ravel(), 3: rows[:, 1].ravel(), 5: np.arange(16)}
    expected, means = plain(small_model(), rows_of)
    keys = {**KEYS, "microbatches": microbatches}
    found, same_means = gradient(small_model(), tuple(rows_of), mesh, **keys)
    assert same_means.keys() == means.keys()
    for name, value in means.items():
        np.testing.assert_allclose(same_means[name], value, rtol=1e-5)
    assert_close(found, expected)


@pytest.mark.slow
def test_depths_can_read_rows_of_their_own():
    _, means = gradient(small_model(), (2, 4), depths_rows="parts")
    losses = []
    for first, depth in enumerate((2, 4)):
        logits = small_model(num_steps=depth).apply(
            {"params": random_params(small_model())}, BATCH["inputs"]
        )
        picked = jnp.take_along_axis(
            jax.nn.log_softmax(logits[..., :50]), BATCH["targets"][..., None], -1
        )
        mask = BATCH["mask"][first::2]
        losses.append(-(picked[first::2, :, 0] * mask).sum() / mask.sum())
    np.testing.assert_allclose(means["loss"], np.mean(losses), rtol=1e-5)


@pytest.mark.parametrize(
    ("scheme", "expected"),
    [
        *(((s, 9.0)) for s in ("euler", "midpoint", "heun", "rk4")),
        *((s, 5.0) for s in ("lie_trotter", "strang")),  # which move by f and by g in turn
    ],
)
@pytest.mark.parametrize("remat", ["none", "full"])
def test_every_scheme_integrates_the_square_of_the_velocity(scheme, expected, remat):
    """Of f = 1 and g = 2: (f + g)^2, or f^2 + g^2 where each moves the state by itself."""
    field = VectorField(lambda W, y: W * jnp.ones_like(y), lambda W, y: 2 * W * jnp.ones_like(y))
    y = jnp.zeros((2, 3, 4))

    def solve(W):
        return integrate(
            lambda _: lambda key: charge(field),
            W,
            StateWithCost.at_start(y, (VelocityPenalty(1.0).rate,)),
            scheme=scheme,
            num_steps=4,
            step_size=1 / 4,
            remat=remat,
        )

    ones = jnp.ones(grid(scheme, 4).size)
    end = solve(ones)
    np.testing.assert_allclose(end.y, 3, rtol=1e-5)
    np.testing.assert_allclose(end.costs[0], np.full((2, 3), expected), rtol=1e-5)
    # The cost grows with the square of the field, so its derivative along the field is twice it.
    slope = jax.grad(lambda s: solve(s * ones).costs[0].mean())(1.0)
    np.testing.assert_allclose(slope, 2 * expected, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"remat": "full"},
        {"remat": "full", "dtype": "bfloat16"},
        {"remat": "keep:mlp", "scheme": "heun"},
        {"remat": "full", "weights": "per_layer", "step_size": "1"},
        {"remat": "dots"},
    ],
    ids=str,
)
def test_recomputation_changes_nothing(changes):
    model = small_model(**changes)
    stored = small_model(**{**changes, "remat": "none"})
    expected, found = (gradient(each, velocity_penalty=PENALTY) for each in (stored, model))
    assert found[1]["velocity"] > 0
    assert_close(found, expected, 2e-2 if "dtype" in changes else 2e-5)


@pytest.mark.slow
def test_split_sequences_charge_the_same():
    model = small_model(num_steps=4, max_length=12)
    batch = jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (0, 2))), BATCH)
    of_mesh = partial(gradient, model, (2, 4), **KEYS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "BATCH", batch)
        expected, found = of_mesh(None), of_mesh({"context": 2, "tensor": 2})
    assert_close(found, expected)


@pytest.mark.slow
@pytest.mark.in_turns("trainings")
def test_a_run_reports_what_it_adds_and_evaluates_the_loss_alone(small, tmp_path):
    small.mesh.fsdp = 1
    small.train.update(
        depths=(1, 4),
        depths_per_step=2,
        depths_rows="every:4",
        depths_distill=0.5,
        velocity_penalty=0.1,
        microbatches=2,
        total_steps=4,
        eval_every=4,
    )
    assert train_to_end(Config.of(small), tmp_path) == 0
    lines = list(read_metrics(tmp_path))
    last = [line for line in lines if "train/loss" in line][-1]
    assert last["train/velocity"] > 0 and last["train/distillation"] > 0
    assert last["train/num_steps"] == 2.5
    assert "eval/velocity" not in lines[-1]
    load_run(tmp_path, 256, batch_size=1)  # which is not divisible by microbatches or rows
