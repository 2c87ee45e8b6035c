"""Structures of depth in examples/depth: each is its paper's formula, causal, and generates."""

import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import small_config
from scipy.special import softmax

import t5x_diffeq as td
from examples.depth.state_space import StateSpace
from t5x_diffeq.analysis.lyapunov import lyapunov_exponents
from t5x_diffeq.config.config import Config
from t5x_diffeq.config.plugins import load_plugin
from t5x_diffeq.hf.save_pretrained import check_form
from t5x_diffeq.model.adaptive import Adaptive, check_adaptive
from t5x_diffeq.model.config import ModelConfig
from t5x_diffeq.model.language_model import LanguageModel, make_source, nodes
from t5x_diffeq.model.layers.array_types import Places
from t5x_diffeq.model.layers.parameter import declare, map_parameters
from t5x_diffeq.model.ode.integrate import integrate, trajectory
from t5x_diffeq.model.ode.solvers import VectorField, euler
from t5x_diffeq.model.scheme_checks import check_scheme, leaves_of
from t5x_diffeq.system.errors import InputError
from t5x_diffeq.training.checks import run_checks

_PACKAGE = "examples.depth"
_N, _D = 4, 6
_NARROW = {"dtype": "bfloat16", "state_dtype": "bfloat16"}
SCHEMES = {
    "averages": f"{_PACKAGE}.averages_over_depth:averages",
    "adams_bashforth": f"{_PACKAGE}.adams_bashforth:adams_bashforth",
    "momentum": f"{_PACKAGE}.momentum:momentum(gamma=0.7)",
    "skips": f"{_PACKAGE}.unet_skips:skips",
    "attention": f"{_PACKAGE}.attention_residuals:attention_residuals",
    "hyper": f"{_PACKAGE}.hyper_connections:hyper_connections(streams=3)",
    "constrained": f"{_PACKAGE}.hyper_connections:hyper_connections(streams=3, constrained=True)",
    "loop": f"{_PACKAGE}.loop:injected",
}


def _f(W, y):
    return np.tanh(y @ W["f"])


def _g(W, y):
    return np.sin(y @ W["g"])


def _layer(W, y, dt):
    y = y + dt * _f(W, y)
    return y + dt * _g(W, y)


# ------------------------------------------- the papers' formulas, on NumPy arrays and lists


def _averages(W, y, dt):
    states = [y]
    for w in W:
        states.append(_layer(w, y, dt))
        a = np.eye(_N + 1)[len(states) - 1] + w["scheme"]["averages"]
        y = sum(a[k] * states[k] for k in range(len(states)))
    return y


def _adams_bashforth(W, y, dt):
    F = [_f(W[0], y) + _g(W[0], y)]
    y = y + dt * F[0]
    for w in W[1:]:
        F.append(_f(w, y) + _g(w, y))
        y = y + dt * (1.5 * F[-1] - 0.5 * F[-2])
    return y


def _momentum(W, y, dt):
    v = np.zeros_like(y)
    for w in W:
        v = 0.7 * v + 0.3 * (_f(w, y) + _g(w, y))
        y = y + dt * v
    return y


def _skips(W, y, dt):
    first = _layer(W[0], y, dt)
    second = _layer(W[1], first, dt)
    third = _layer(W[2], second + W[2]["scheme"]["gain"] * second, dt)
    return _layer(W[3], third + W[3]["scheme"]["gain"] * first, dt)


def _attention(W, y, dt):
    values = [y]

    def read(q):
        v = np.stack(values)
        keys = v / np.sqrt(np.square(v).mean(-1, keepdims=True) + 1e-6)
        return (softmax(keys @ q, axis=0)[..., None] * v).sum(0)

    for w in W:
        values.append(dt * _f(w, y))
        values.append(dt * _g(w, read(w["scheme"]["queries"][0])))
        y = read(w["scheme"]["queries"][1])
    return y


def _hyper(W, y, dt, constrained=False):
    H, eye = np.stack([y] * 3), np.eye(3)
    for n, w in enumerate(W):
        for s, function in enumerate((_f, _g)):
            learned = {name: x[s] for name, x in w["scheme"].items()}
            R = eye + learned["mix"]
            if constrained:
                R = np.exp(8 * R)
                for _ in range(20):
                    R = R / R.sum(0)
                    R = R / R.sum(1, keepdims=True)
            m = eye[(2 * n + s) % 3] + learned["read"]
            out = dt * function(w, np.einsum("i,ibld->bld", m, H))
            H = np.einsum("ij,ibld->jbld", R, H) + np.multiply.outer(1 + learned["write"], out)
    return H.mean(0)


def _loop(W, y, dt):
    y0 = y
    for w in W:
        y = _layer(w, y + y0 @ w["scheme"]["injection"], dt)
    return y


FORMULAS = {
    "averages": _averages,
    "adams_bashforth": _adams_bashforth,
    "momentum": _momentum,
    "skips": _skips,
    "attention": _attention,
    "hyper": _hyper,
    "constrained": lambda W, y, dt: _hyper(W, y, dt, constrained=True),
    "loop": _loop,
}


def _model_config(**changes) -> ModelConfig:
    keys = Config.of(small_config("text.txt")).model
    sizes = {"num_steps": _N, "embed_dim": 2 * _D, "mlp_dim": 16, "attention": "xla"}
    return replace(ModelConfig.of(keys, 50, 16), **sizes, **changes)


def _random_leaves(config: ModelConfig) -> dict:
    made = leaves_of(replace(config, embed_dim=_D))
    return jax.tree.map(
        lambda leaf: np.random.default_rng(leaf.size).normal(leaf, 0.3, (_N, *leaf.shape)), made
    )


@pytest.mark.parametrize("name", SCHEMES)
def test_a_scheme_is_the_formula_of_its_paper(name):
    config, rng = _model_config(scheme=SCHEMES[name]), np.random.default_rng(0)
    kernels = {part: rng.normal(size=(_N, _D, _D)) / 2 for part in "fg"}
    W = {**kernels, **_random_leaves(config)}
    y = rng.normal(size=(2, 3, _D))
    by_step = [jax.tree.map(lambda leaf, n=n: leaf[n], W) for n in range(_N)]
    expected = FORMULAS[name](by_step, y, 1 / _N)
    field = VectorField(lambda W, y: jnp.tanh(y @ W["f"]), lambda W, y: jnp.sin(y @ W["g"]))
    arguments = {"scheme": SCHEMES[name], "num_steps": _N, "step_size": 1 / _N}
    W, y = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), (W, y))

    def solve(remat):
        return lambda W, y: integrate(lambda _: lambda key: field, W, y, **arguments, remat=remat)

    end, pull_back = jax.vjp(solve("none"), W, y)
    np.testing.assert_allclose(end, expected, rtol=1e-5, atol=1e-5)
    recomputed, pull_back_again = jax.vjp(solve("full"), W, y)
    np.testing.assert_allclose(recomputed, end, rtol=1e-5, atol=1e-5)
    ones = jnp.ones_like(end)
    for a, b in zip(*map(jax.tree.leaves, (pull_back(ones), pull_back_again(ones))), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
    states = trajectory(lambda _: lambda key: field, W, y, **arguments)
    np.testing.assert_allclose(states[0], y, rtol=1e-6)
    np.testing.assert_allclose(states[-1], end, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", SCHEMES)
def test_schemes_pass_the_check(name):
    """With states of fewer bits, which a number of the scheme's own could widen."""
    check_scheme(_model_config(scheme=SCHEMES[name], **_NARROW))


def _refused_by_a_check(keys=None, **facts) -> str:
    """What the check says of a scheme with these facts, in place of Euler's."""
    scheme = replace(td.Scheme(euler, nodes=(1.0,), order=1, evaluations=(1, 1)), **facts)
    vars(sys.modules[__name__])["tried"] = scheme
    load_plugin.cache_clear()
    with pytest.raises(InputError) as refused:
        check_scheme(_model_config(scheme=f"{__name__}:tried", **(keys or {})))
    return str(refused.value)


def _leaf(module, config):
    declare(module, "gain", jax.nn.initializers.ones, (), (), "scale")


def _reads_gain(mixes):
    def step(field, W, y, dt):
        y = y + W[0]["scheme"]["gain"] * dt * field(W[0], y)
        return jnp.roll(y, 1, axis=1) if mixes else y

    return step


def _widening(field, W, y, dt):
    return (y + dt * field(W[0], y)).astype(jnp.float32)


def _first_of_two(field, W, memory, dt):
    return memory[0] + dt * field(W[0], memory[0])


def _both(field, W, memory, dt):
    return _first_of_two(field, W, memory, dt), memory[0]


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"leaves": _leaf}, "declares scheme.gain, which its steps don't read"),
        ({"leaves": _leaf, "step": _reads_gain(mixes=True)}, "mixes tokens; only f may do that"),
        ({"leaves": _leaf, "step": _reads_gain(False), "evaluations": (2, 1)}, "correct its eval"),
        ({"step": lambda f, W, y, dt: f(W[0], y)}, "changes the state where f and g are zero, so"),
        ({"step": lambda f, W, y, dt: y + dt * f(y, W[0])}, "weights first, and then the state: f"),
        ({"step": lambda f, W, y, dt: y - dt * jnp.cumsum(f(W[0], y), 1)}, "mixes tokens"),
        (
            {"order": 2},
            "error is 9.6e-02, with 8 steps 1.9e-01: that is order 1; corr",
        ),
        ({"step": lambda f, W, y, dt: y + 3 * dt * f(W[0], y)}, "that is order 0; correct it, or"),
        ({"step": lambda f, W, y, dt: y - dt * f(W[0], y)}, "that is order 0; correct it, or"),
        ({"layer": "sequential"}, "says layer='sequential', and its steps aren't those of lie_tr"),
        ({"remembers": "nothing"}, "a scheme says what it remembers exactly if it has its own"),
        ({"leaves": _leaf, "step": lambda *_: 1 / 0}, "can't take 4 steps: ZeroDivisionError"),
        ({"leaves": _leaf, "step": lambda *_: 1 / 0}, "depth_examples_test.py, line "),
        (
            {"keys": _NARROW, "step": _widening, "remembers": "y", "begin": lambda y, _: y}
            | {"grows": True},
            "returns float32[1, 3, 4] for a state bfloat16[1, 3, 4]",
        ),
        (
            {"remembers": "both", "begin": lambda y, N: (y, y), "step": _first_of_two},
            "takes (float32[1, 3, 4], float32[1, 3, 4]) in a step and returns float32[1, 3, 4]; "
            "return what it takes, or say grows=True",
        ),
        (
            {"remembers": "both", "begin": lambda y, N: (y, y), "step": _both},
            "ends with a memory; give it end(memory), which returns its state",
        ),
    ],
)
def test_what_the_check_refuses(facts, message):
    assert message in _refused_by_a_check(**facts)


def test_a_step_returns_the_dtype_of_the_state():
    scheme = td.Scheme(_reads_gain(False), (1.0,), None, (1, 1), leaves=_leaf)
    vars(sys.modules[__name__])["tried"] = scheme
    load_plugin.cache_clear()
    config = _model_config(scheme=f"{__name__}:tried")
    check_scheme(config)
    with pytest.raises(
        InputError, match=r"takes bfloat16\[1, 3, 4\] .* returns float32\[1, 3, 4\]; leaves of"
    ):
        check_scheme(replace(config, dtype="bfloat16", state_dtype="bfloat16"))


def test_what_a_scheme_that_remembers_can_not_do():
    config = _model_config(scheme=SCHEMES["averages"])
    tokens = jnp.zeros((1, 3), jnp.int32)
    with pytest.raises(InputError, match="also remembers the states of all earlier layers"):
        lyapunov_exponents(LanguageModel(config), {}, tokens)
    with pytest.raises(InputError, match=r"isn't one of a solver \(its order is None\)"):
        check_adaptive(config, Adaptive())
    with pytest.raises(InputError, match="its step isn't a layer that adds attention and MLP"):
        check_form(config)
    with pytest.raises(InputError, match=r"exists for its own num_steps=4 alone"):
        config.at_depth(2)
    with pytest.raises(InputError, match=r"is euler, and \S+:averages has leaves of its own"):
        LanguageModel(_model_config()).at_depth(_N, SCHEMES["averages"])
    penalised = small_config("text.txt")
    penalised.model.scheme, penalised.train.velocity_penalty = SCHEMES["averages"], 0.1
    with pytest.raises(InputError, match=r"set train.velocity_penalty=0"):
        run_checks("train", Config.of(penalised))


SOURCES = {
    "nested": f"{_PACKAGE}.nested_layers:NestedLayers(layers=6)",
    "relaxed": f"{_PACKAGE}.relaxed_recursion:RelaxedRecursion(layers=2, rank=3)",
    "ends": f"{_PACKAGE}.own_ends:OwnEnds(middle=1)",
    "copied": f"{_PACKAGE}.copied_layers:CopiedLayers(layers=6)",
}


@pytest.mark.parametrize("name", SOURCES)
def test_a_source_is_the_formula_of_its_paper(name):
    config = _model_config(weights=SOURCES[name])
    source, times = make_source(config, parent=None), jnp.asarray(nodes(config))
    declared = jax.eval_shape(source.init, jax.random.key(0), times)["params"]
    params = map_parameters(
        lambda leaf: np.random.default_rng(leaf.value.size).normal(size=leaf.value.shape), declared
    )

    def made_at(times):
        made = source.apply({"params": jax.tree.map(jnp.asarray, params)}, times)
        return made["mlp"]["up"]["kernel"]

    made = made_at(times)
    of_layers = params["changes" if name == "copied" else "weights"]
    layers = of_layers["mlp"]["up"]["kernel"]
    if name == "nested":  # of 6 layers, 4 steps read the layers 2, 3, 5 and 6
        expected = layers[[1, 2, 4, 5]]
    elif name == "copied":
        shared = params["shared"]["mlp"]["up"]["kernel"]
        expected = shared + layers[[1, 2, 4, 5]]
        np.testing.assert_allclose(made_at(jnp.ones(1))[0], shared, rtol=1e-5)
    elif name == "ends":
        expected = layers[[0, 1, 1, 2]]
    else:
        A, B = (params[f"mlp.up.kernel.{part}"] for part in "AB")
        expected = [layers[n % 2] + A[n] @ B[n] for n in range(_N)]
    np.testing.assert_allclose(made, expected, rtol=1e-5, atol=1e-5)


def test_the_state_space_basis_is_a_damped_oscillator():
    t = np.linspace(0, 1, 5)
    x = np.exp((-0.5 + 1j * np.pi * np.arange(5)[:, None]) * t)
    expected = np.concatenate((x[:4].real, x[1:].imag)).T
    np.testing.assert_allclose(StateSpace(8)(jnp.asarray(t)), expected, atol=1e-5)


def _cases():
    for name, scheme in SCHEMES.items():
        variant = {"weights": "shared"} if name == "loop" else {"weights": "per_layer"}
        yield pytest.param({"scheme": scheme, **variant}, id=name)
    for name, source in SOURCES.items():
        yield pytest.param({"weights": source, "scheme": "lie_trotter"}, id=name)
    for name in ("averages", "hyper"):
        yield pytest.param({"scheme": SCHEMES[name]}, id=f"{name}-of-t")
    yield pytest.param({"time_basis": f"{_PACKAGE}.state_space:StateSpace(4)"}, id="state_space")


@pytest.mark.slow
@pytest.mark.in_turns
@pytest.mark.parametrize("choice", _cases())
def test_a_model_is_causal_and_generates_what_it_reads(choice):
    """Its leaves are moved from where they begin, so that they count."""
    config = _model_config(**choice)
    model, tokens = LanguageModel(config), jax.random.randint(jax.random.key(1), (2, 6), 0, 50)
    params = jax.jit(model.init)(jax.random.key(0), tokens)["params"]
    params = map_parameters(
        lambda leaf: (
            leaf.value + 0.05 * jax.random.normal(jax.random.key(leaf.value.size), leaf.value.shape)
        ),
        params,
    )
    apply = jax.jit(model.apply)
    logits = apply({"params": params}, tokens)
    changed = apply({"params": params}, tokens.at[:, 4].add(1))
    np.testing.assert_allclose(changed[:, :4], logits[:, :4], rtol=1e-5, atol=1e-5)
    assert not np.allclose(changed[:, 4:], logits[:, 4:], atol=1e-3)

    @jax.jit
    def read_in_parts(params):
        bound = model.bind({"params": params})
        weights, caches = bound.merged_weights_by_step(), bound.empty_caches(2, 6)
        parts = []
        for start, end in ((0, 4), (4, 5), (5, 6)):
            places = Places(jnp.broadcast_to(jnp.arange(start, end), (2, end - start)))
            real = jnp.ones((2, end - start), bool)
            y, caches = bound.extend(tokens[:, start:end], places, real, weights, caches)
            parts.append(bound.logits(y))
        return jnp.concatenate(parts, axis=1)

    np.testing.assert_allclose(read_in_parts(params), logits, rtol=1e-4, atol=1e-4)
