"""Exponents against closed forms, an independent transcription, and derivatives by jacrev."""

import dataclasses
import time

import jax
import jax.numpy as jnp
import numpy as np
import numpy_model
import pytest
from small_models import GPT_ODE, LLAMA, TOKENS, gpt_params, load, random_params, small

from t5x_diffeq.analysis.lyapunov import choose_chunks, lyapunov_exponents, pair_exponents, step_map
from t5x_diffeq.analysis.tangents import pair_growth
from t5x_diffeq.model.language_model import LanguageModel
from t5x_diffeq.model.ode.integrate import step_inputs
from t5x_diffeq.system.errors import InputError

EIGENVALUES = np.array([1.5, 0.4, -0.7, -2.0])


def of_linear_field(num_steps):
    """Of y' = A y of each token by itself, and a quarter of it from every other; A symmetric."""
    rng = np.random.default_rng(0)
    U = np.linalg.qr(rng.normal(size=(4, 4)))[0]
    A = jnp.asarray(U @ np.diag(EIGENVALUES) @ U.T, jnp.float32)

    def step(y, W):
        return y + (y + 0.25 * (y.sum(1, keepdims=True) - y)) @ W.T / num_steps

    weights = jnp.broadcast_to(A, (num_steps, 4, 4))
    states = jnp.ones((num_steps, 1, 3, 4))
    return pair_exponents(step, weights, states, np.array([2]))


@pytest.mark.parametrize("num_steps", [6, 50])
def test_closed_form_of_a_symmetric_field(num_steps):
    """I + dt A for the token itself, I + dt A / 4 for another."""
    found = of_linear_field(num_steps).exponents[0]
    for token, factor in ((2, 1.0), (0, 0.25), (1, 0.25)):
        each = num_steps * np.log(np.abs(1 + factor * EIGENVALUES / num_steps))
        np.testing.assert_allclose(found[token], np.sort(each)[::-1], atol=1e-5)


def official(model, params, tokens, j):
    """The official convention once more: NumPy in float64, loops, differences, NumPy's QR."""
    c, D, L = model.config, model.config.embed_dim, len(tokens)
    p64 = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    f, g = numpy_model.fields(c)
    y = p64["token_embedding"]["table"][tokens] + p64["position_embedding"]["table"][:L]
    Q, logs = np.tile(np.eye(D), (L, 1, 1)), []
    for n in range(c.num_steps):
        y = numpy_model.step(c, lambda node, n=n: numpy_model.weights_at(c, p64, n, node), y)
        W = numpy_model.weights_at(c, p64, n, 0)  # t = n / N, and y is after the step
        logs.append([])
        for k in range(L):
            J = np.empty((D, D))
            for d in range(D):
                h = np.zeros_like(y)
                h[k, d] = 1e-6
                up, down = ((f(W, x) + g(W, x))[j] for x in (y + h, y - h))
                J[:, d] = (up - down) / 2e-6
            Q[k], R = np.linalg.qr(Q[k] + J @ Q[k] / c.num_steps)
            logs[-1].append(np.log(np.abs(np.diag(R))))
    return np.array(logs)


@pytest.mark.slow
def test_official_convention():
    arrays = load("gpt_ode.npz")
    params = gpt_params(arrays, "param")
    model = LanguageModel(dataclasses.replace(GPT_ODE, num_steps=3))
    tokens = arrays["input/tokens"][:, :6].astype(np.int32)
    found = lyapunov_exponents(model, params, jnp.asarray(tokens), convention="official")
    expected = official(model, params, tokens[1], 5)
    np.testing.assert_allclose(found.by_step[:, 1], expected, atol=2e-5)
    np.testing.assert_allclose(found.exponents[1], expected.sum(0), atol=5e-5)


def step_jacobians(model, params, tokens):
    """d y(n+1) / d y(n) of each step between all tokens of row 0, by jacrev."""
    weights = model.apply({"params": params}, method="weights")
    states = model.apply({"params": params}, tokens, weights, method="trajectory")
    by_step, _ = step_inputs(weights, model.config.scheme, model.config.num_steps, key=None)
    step = step_map(model.config, tokens.shape[1])
    jacobian = jax.jit(lambda y, W: jax.jacrev(lambda y: step(y[None], W)[0])(y))
    each = [jax.tree.map(lambda x, n=n: x[n], by_step) for n in range(model.config.num_steps)]
    return [np.asarray(jacobian(states[n, 0], W), np.float64) for n, W in enumerate(each)]


VARIANTS = {
    "euler": {},
    "lie_trotter": {"weights": "per_layer", "scheme": "lie_trotter", "step_size": "1"},
    "midpoint-llama": {"scheme": "midpoint", **LLAMA, "num_steps": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_equal_the_products_of_whole_jacobians(changes):
    model = small(**changes)
    params, tokens, j = random_params(model), TOKENS[:, :5], 3
    steps = step_jacobians(model, params, tokens)
    outputs = np.array([j, 4])
    arguments = (model, params, tokens)
    pair = lyapunov_exponents(*arguments, outputs=outputs)
    full = lyapunov_exponents(*arguments, outputs=outputs, convention="full")
    whole = np.eye(80)
    for dS in steps:
        whole = dS.reshape(80, 80) @ whole
    whole = whole.reshape(5, 16, 5, 16)
    for k in range(j + 1):
        M = np.eye(16)
        for dS in steps:
            M = (dS[j, :, k] + (k != j) * np.eye(16)) @ M
        for found, expected in ((pair, M), (full, whole[j, :, k])):
            values = np.linalg.svd(expected, compute_uv=False)
            error = np.abs(np.exp(found.exponents[0, k]) - values)
            assert error.max() < 1e-4 * values.max()
        total = pair.by_step[:, 0, k].sum()
        assert total == pytest.approx(np.linalg.slogdet(M)[1], abs=1e-3)
    assert np.isnan(pair.exponents[0, j + 1 :]).all() and np.isfinite(pair.exponents[1]).all()
    assert pair.largest.shape == (2, 5) and full.by_step is None


@pytest.mark.slow
def test_chunks_change_nothing():
    """A bound so small that tokens and products go one at a time; and a padded prompt."""
    model = small()
    params = random_params(model)
    at_once = lyapunov_exponents(model, params, TOKENS[:, :5])
    one_by_one = lyapunov_exponents(model, params, TOKENS[:, :5], memory=1e-9)
    np.testing.assert_allclose(one_by_one.exponents, at_once.exponents, atol=1e-4)
    padded = TOKENS[:, :7].at[:, 5:].set(0)
    longer = lyapunov_exponents(model, params, padded, outputs=np.array([4, 4]))
    np.testing.assert_allclose(longer.exponents[:, :5], at_once.exponents, atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "arguments", "message"),
    [
        ({}, {"convention": "half"}, "convention 'half' is unknown; there are pair, official"),
        ({"weights": "per_layer"}, {"convention": "official"}, "and per_layer weights; set --conv"),
        ({}, {"outputs": np.array([0, 5])}, r"output tokens \[0, 5\] must be in \[0, 5\)"),
        ({"max_length": 4}, {}, "a prompt has 5 tokens; the model takes 1 to 4"),
    ],
)
def test_bad_questions(changes, arguments, message):
    with pytest.raises(InputError, match=message):
        lyapunov_exponents(small(**changes), {}, TOKENS[:, :5], **arguments)


# ---------------------------------------------------------------- cost


@pytest.mark.slow
def test_the_same_as_jacrev_of_the_whole_block_in_less_memory(capsys, whole):
    """Prints the times, taken in turns; with --whole, those of the README."""
    D = 128
    steps, repeats = (12, 3) if whole else (2, 1)
    model = small(embed_dim=D, mlp_dim=4 * D, num_steps=steps, max_length=16)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 50, (1, 16)), jnp.int32)
    params = random_params(model, scale=0.05)
    weights = model.apply({"params": params}, method="weights")
    before = model.apply({"params": params}, tokens, weights, method="trajectory")[:-1]
    step = step_map(model.config, 16)
    by_step, _ = step_inputs(weights, "euler", steps, key=None)
    others = (jnp.arange(16) != 15)[:, None, None] * jnp.eye(D)

    @jax.jit
    def by_jacrev(by_step, states):
        def advance(Q, at):
            W, y = at
            J = jax.jacrev(lambda y: step(y, W)[0])(y)[15, :, 0]  # [D, L, D]
            Q, R = jnp.linalg.qr((jnp.moveaxis(J, 1, 0) + others) @ Q)
            return Q, jnp.log(jnp.abs(jnp.diagonal(R, axis1=-2, axis2=-1)))

        start = jnp.broadcast_to(jnp.eye(D), (16, D, D))
        return jax.lax.scan(advance, start, (by_step, states))[1]

    ways = {
        "ours": lambda: pair_exponents(step, by_step, before, np.array([15])).by_step[:, 0],
        "jacrev": lambda: np.asarray(by_jacrev(by_step, before)),
    }
    np.testing.assert_allclose(ways["ours"](), ways["jacrev"](), atol=1e-4)
    seconds = {name: [] for name in ways}
    for _ in range(repeats):
        for name, way in ways.items():
            begun = time.perf_counter()
            way()
            seconds[name].append(time.perf_counter() - begun)
    ours, jacrev = (float(np.median(seconds[name])) for name in ways)
    chunks = choose_chunks(1.0, before, by_step)
    arguments = step, by_step, before, np.array([15]), jnp.asarray(0), chunks
    compiled = pair_growth.lower(*arguments).compile(), by_jacrev.lower(by_step, before).compile()
    megabytes = [each.memory_analysis().temp_size_in_bytes / 2**20 for each in compiled]
    with capsys.disabled():
        print(
            f"\nours {ours:.2f} s, {megabytes[0]:.0f} MiB; "
            f"jacrev {jacrev:.2f} s, {megabytes[1]:.0f} MiB"
        )
    assert megabytes[1] > 5 * megabytes[0]
