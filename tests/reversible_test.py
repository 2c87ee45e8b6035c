"""Reversible schemes: their steps, gradients of reconstructed states, memory and drift over depth.

launch/test.sh --whole --slow tests/reversible_test.py -k "drift or memory" -s    # figures of both
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compilation import AS_FOR_USERS
from flax import linen as nn
from helpers import assert_close, setup_of, small_config
from small_models import LLAMA, SMALL, TOKENS, random_params, small

from t5x_diffeq.models.language_model import LanguageModel, in_one_document
from t5x_diffeq.models.sub_fields import vector_field
from t5x_diffeq.ode.integrate import integrate, step_inputs, trajectory
from t5x_diffeq.ode.reversible import Pair
from t5x_diffeq.ode.running_cost import StateWithCost
from t5x_diffeq.ode.schemes import find_scheme, grid
from t5x_diffeq.ode.solvers import VectorField

MCCALLUM_FOSTER = "reversible:midpoint"
DEPTHS = (12, 48, 192)
D = 16
FIELD = VectorField(
    f=lambda W, y: jnp.tanh(y @ W["a"]), g=lambda W, y: 0.5 * jnp.sin(y @ W["b"]) - y
)


# ----------------------------------------------------------------------------- the steps


def matrices(scheme, num_steps):
    rng = np.random.default_rng(0)
    nodes = grid(scheme, num_steps).size
    return {k: jnp.asarray(rng.normal(size=(nodes, D, D)) / 4, jnp.float32) for k in "ab"}


def states_of(scheme, num_steps, y):
    return trajectory(
        lambda key: FIELD,
        matrices(scheme, num_steps),
        y,
        scheme=scheme,
        num_steps=num_steps,
        step_size=1 / num_steps,
    )


START = jnp.asarray(np.random.default_rng(1).normal(size=(3, D)), jnp.float32)


def test_leapfrog_is_the_two_step_recursion():
    W = matrices("leapfrog", 4)
    F = [functools.partial(FIELD, jax.tree.map(lambda w, n=n: w[n], W)) for n in range(4)]
    y = [START, START + 0.25 * F[0](START)]
    for n in range(1, 4):
        y.append(y[n - 1] + 0.5 * F[n](y[n]))
    np.testing.assert_allclose(states_of("leapfrog", 4, START), jnp.stack(y), atol=1e-6)
    np.testing.assert_allclose(grid("leapfrog", 4)[:, 0], [0, 0.25, 0.5, 0.75])


def test_mccallum_foster_is_the_papers_equation():
    """With midpoint, whose step back in time reads W at 1 and 1/2."""
    name, coupling, h = "reversible:midpoint(0.7)", 0.7, 1 / 3
    W = matrices(name, 3)

    def increment(n, first, dt, y):
        start, half = (jax.tree.map(lambda w, i=i: w[3 * n + i], W) for i in (first, 1))
        return dt * FIELD(half, y + dt / 2 * FIELD(start, y))

    y, z, states = START, START, [START]
    for n in range(3):
        y = coupling * y + (1 - coupling) * z + increment(n, 0, h, z)
        z = z - increment(n, 2, -h, y)
        states.append(y)
    np.testing.assert_allclose(states_of(name, 3, START), jnp.stack(states), atol=2e-6)
    np.testing.assert_allclose(grid(name, 2), [[0, 0.25, 0.5], [0.5, 0.75, 1]])


# ----------------------------------------------------------------------------- the gradients


def gradients(scheme, num_steps, remat):
    def loss(W, y):
        y = integrate(
            lambda key: FIELD,
            W,
            y,
            scheme=scheme,
            num_steps=num_steps,
            step_size=1 / num_steps,
            remat=remat,
        )
        return jnp.square(y).sum()

    return jax.jit(jax.grad(loss, argnums=(0, 1)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheme", "num_steps"),
    [
        *(("leapfrog", n) for n in DEPTHS),
        *((MCCALLUM_FOSTER, n) for n in DEPTHS[:2]),
        ("reversible:midpoint(0.999)", DEPTHS[2]),  # 0.99^-192 is 7
        ("reversible:strang", DEPTHS[1]),
    ],
)
def test_gradients_are_those_of_stored_states(scheme, num_steps):
    W = matrices(scheme, num_steps)
    stored = gradients(scheme, num_steps, "none")(W, START)
    assert_close(gradients(scheme, num_steps, "full")(W, START), stored, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"scheme": "leapfrog"},
        {"scheme": MCCALLUM_FOSTER, "weights": "per_layer", **LLAMA},
    ],
    ids=lambda changes: changes["scheme"],
)
def test_gradients_of_a_model_with_dropout(changes):
    """The backward pass drops the same units: its keys are those of the steps."""

    def gradient(remat):
        model = small(dropout_rate=0.2, remat=remat, **changes)

        def loss(params):
            rngs = {"dropout": jax.random.key(3)}
            out = model.apply({"params": params}, TOKENS, deterministic=False, rngs=rngs)
            return jnp.square(out[..., :50]).mean()

        return jax.jit(jax.grad(loss))(random_params(model, scale=0.1))

    assert_close(gradient("full"), gradient("none"), 1e-5)


@pytest.mark.parametrize("scheme", ["leapfrog", "reversible:euler"])
def test_a_running_cost_is_reconstructed_too(scheme):
    def solve(remat, W, y):
        def charged(sub_field):
            def with_cost(W, y):
                value = sub_field(W, y.y)
                return StateWithCost(value, jnp.square(value).mean())

            return with_cost

        charging = VectorField(charged(FIELD.f), charged(FIELD.g))
        end = integrate(
            lambda key: charging,
            W,
            StateWithCost.at_start(y),
            scheme=scheme,
            num_steps=6,
            step_size=1 / 6,
            remat=remat,
        )
        return end.y.sum() + 3 * end.cost

    W = matrices(scheme, 6)
    full, none = (
        jax.jit(jax.grad(functools.partial(solve, remat), argnums=(0, 1)))(W, START[None])
        for remat in ("full", "none")
    )
    assert_close(full, none, 1e-5)


@pytest.mark.slow
def test_sharded_equals_whole(tmp_path):
    """The gradient over a mesh of 8 devices, with tensor and batch split."""
    config = small_config(tmp_path)
    config.model.update(scheme="leapfrog", remat="full", num_steps=2)

    def gradient(devices, **mesh):
        config.mesh.update(mesh)
        setup = setup_of(config, devices=devices)
        length = setup.model.config.max_length
        tokens = jnp.asarray(np.random.default_rng(0).integers(0, 50, (8, length)), jnp.int32)
        with setup.context():
            params = setup.init_state().params
            loss = lambda p: jnp.square(setup.model.apply({"params": p}, tokens)[..., :50]).mean()  # noqa: E731
            return jax.device_get(jax.jit(jax.grad(loss))(params))

    whole = gradient(jax.devices()[:1], fsdp=1)
    assert_close(gradient(jax.devices(), data=2, fsdp=2, tensor=2), whole, 1e-5)


# ----------------------------------------------------------------------------- memory


def temporaries(scheme, num_steps, remat):
    """Bytes of temporaries of the compiled gradient, for a state of 1 MiB."""
    W = matrices(scheme, num_steps)
    y = jax.ShapeDtypeStruct((2**14, D), jnp.float32)
    compiled = gradients(scheme, num_steps, remat).lower(W, y).compile()
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["leapfrog", MCCALLUM_FOSTER])
def test_memory_does_not_grow_with_depth(scheme):
    """Within 5% from 12 to 192 steps; the states alone would take 16 times as much.

    What grows with leapfrog is a copy of W, which XLA makes for another layout: 0.35 MiB of 9.
    """
    sizes = [temporaries(scheme, n, "full") for n in DEPTHS]
    assert max(sizes) <= 1.05 * min(sizes), sizes
    checkpoints = [temporaries("euler", n, "full") for n in DEPTHS[:2]]
    assert checkpoints[1] - checkpoints[0] >= 36 * 2**20, checkpoints


def temporaries_of_a_model(scheme, num_steps):
    """Bytes of temporaries of the gradient with respect to W and y(0), and bytes of W."""
    shape = {"embed_dim": 64, "mlp_dim": 256, "max_length": 64, "remat": "full"}
    model = small(scheme=scheme, num_steps=num_steps, **shape)
    tokens = jnp.zeros((16, 64), jnp.int32)
    y = jax.ShapeDtypeStruct((16, 64, 64), jnp.float32)
    init = functools.partial(model.init_with_output, jax.random.key(0), method="weights")
    W, _ = jax.eval_shape(init)

    def loss(W, y):
        end, _ = nn.apply(LanguageModel.integrate, model)({}, y, in_one_document(tokens), W)
        return jnp.square(end).mean()

    compiled = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(W, y).compile(AS_FOR_USERS)
    of_weights = sum(4 * x.size for x in jax.tree.leaves(W))
    return compiled.memory_analysis().temp_size_in_bytes, of_weights


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["euler", "leapfrog", MCCALLUM_FOSTER])
def test_memory_of_a_model(scheme):
    """Where a step reads W at one time, XLA's copy of W is subtracted; else it makes none."""
    copies = len(find_scheme(scheme).nodes) == 1
    beside = []
    for num_steps in DEPTHS[::2] if scheme == "euler" else DEPTHS:
        found, of_weights = temporaries_of_a_model(scheme, num_steps)
        beside.append(found - copies * of_weights)
        print(f"\n{scheme}, N = {num_steps}: {found / 2**20:.2f} MiB, W {of_weights / 2**20:.2f}")
    if scheme == "euler":
        assert beside[-1] - beside[0] >= 170 * 2**18  # of 180 states of 0.25 MiB
    else:
        assert max(beside) <= 1.05 * min(beside), beside


# ----------------------------------------------------------------------------- precision


def reconstructed_start(config, weights, y):
    """y(0) from the last pair: forth by the scheme's steps, and back by its couplings."""
    scheme, dt = find_scheme(config.solver), config.dt
    field = vector_field(config, in_one_document(TOKENS))(None)
    inputs, _ = step_inputs(weights, config.solver, config.num_steps, key=None)

    def stages(W):
        return tuple(jax.tree.map(lambda w, i=i: w[i], W) for i in range(len(scheme.nodes)))

    def forth(pair, W):
        return scheme.step(field, stages(W), pair, dt), None

    def back(pair, W):
        v, w, n = pair
        for each in reversed(scheme.couplings):
            v, w = each.reverse(v, w, each.increment(field, stages(W), v, dt, n - 1))
        return Pair(v, w, n - 1), None

    last, _ = jax.lax.scan(forth, scheme.start(y), inputs)
    first, _ = jax.lax.scan(back, last, inputs, reverse=True)
    return first.u


def relative(found, expected):
    """The norm of the difference over that of what is expected, of all leaves together."""
    flat = [jnp.concatenate([x.ravel() for x in jax.tree.leaves(t)]) for t in (found, expected)]
    return float(jnp.linalg.norm(flat[0] - flat[1]) / jnp.linalg.norm(flat[1]))


def drift(scheme, num_steps):
    """Relative errors in bfloat16 of y(0) and the gradient, and of the stored one to float32's."""
    config = dataclasses.replace(
        SMALL, scheme=scheme, num_steps=num_steps, dtype="bfloat16", embed_dim=64, mlp_dim=128
    )
    params = random_params(LanguageModel(config), scale=0.1)

    @functools.partial(jax.jit, static_argnums=1)
    def gradient(params, config):
        def loss(params):
            out = LanguageModel(config).apply({"params": params}, TOKENS)
            return jnp.square(out[..., :50]).mean()

        return jax.grad(loss)(params)

    stored, reconstructed, exact = (
        gradient(params, dataclasses.replace(config, **changes))
        for changes in ({}, {"remat": "full"}, {"dtype": "float32"})
    )
    variables, model = {"params": params}, LanguageModel(config)
    weights = model.apply(variables, method="weights")
    y = model.apply(variables, TOKENS, in_one_document(TOKENS), method="embed")
    start = jax.jit(functools.partial(reconstructed_start, config))(weights, y)
    return relative(start, y), relative(reconstructed, stored), relative(stored, exact)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["leapfrog", MCCALLUM_FOSTER])
def test_drift_in_16_bits(scheme, whole):
    """In bfloat16, reconstruction changes the gradient by less than the dtype itself does."""
    for num_steps in DEPTHS[::2] if whole else DEPTHS[-1:]:
        start, between, stored = drift(scheme, num_steps)
        print(
            f"\n{scheme}, N = {num_steps}: y(0) is off by {start:.1e}, the gradient by "
            f"{between:.1e}; with stored states it is off by {stored:.1e} from float32's"
        )
        assert start <= 0.05 and between <= stored
