"""A weight source and a time basis outside the package: what verbs make of them, and refuse."""

import dataclasses
import json
import os
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from helpers import call, small_config
from numpy.polynomial import chebyshev
from own_sources import OWN as SOURCES_OF_OTHERS
from own_sources import KernelsOfTime
from small_models import random_params
from small_models import small as small_model

import t5x_diffeq as td
from configs import finetune as finetune_config
from examples.own_basis import Chebyshev
from examples.own_source import OwnEnds
from t5x_diffeq.cli import analyze, evaluate, export
from t5x_diffeq.cli.finetune import complete_config
from t5x_diffeq.cli.train import train_to_end
from t5x_diffeq.config.config import Config, ModelKeys, flatten
from t5x_diffeq.inference import validation
from t5x_diffeq.model.language_model import LanguageModel, make_source
from t5x_diffeq.model.layers.parameter import Parameter, declare
from t5x_diffeq.model.ode.sources import SOURCES, SharedWeights, init_stacked, source_of
from t5x_diffeq.model.ode.time_basis import make_time_basis
from t5x_diffeq.model.ode.time_dependent_weights import TimeDependentWeights
from t5x_diffeq.model.ode.weight_source import block_parameters, cast_by_role
from t5x_diffeq.model.plugin_checks import check_source
from t5x_diffeq.system.errors import InputError
from t5x_diffeq.training.checks import run_checks
from t5x_diffeq.training.load import discretise
from t5x_diffeq.training.optimizers.muon import kernels_of_block

OWN = {
    "source": {"weights": "examples.own_source:OwnEnds"},
    "basis": {"time_basis": "examples.own_basis:Chebyshev(3)"},
}
STEPS = 4


@pytest.fixture(scope="module", params=OWN)
def own(request):
    return request.param


@pytest.fixture(scope="module")
def config(own, text):
    config = small_config(text)
    config.model.update(num_steps=STEPS, **OWN[own])
    config.train.update(total_steps=4, checkpoint_every=4, eval_every=4, watch_every=2)
    config.mesh.fsdp = 8
    return config


@pytest.fixture(scope="module")
def workdir(config, tmp_path_factory):
    """The workdir of a run of 4 steps on 8 devices."""
    folder = tmp_path_factory.mktemp("own") / "run"
    assert train_to_end(Config.of(config), folder) == 0
    return folder


pytestmark = pytest.mark.in_turns


@pytest.mark.slow
def test_other_depths_analyses_and_exports(own, workdir, tmp_path, capsys):
    call(evaluate, f"--workdir={workdir}", f"--num_steps={STEPS},{2 * STEPS}", "--batch_size=16")
    at_own, deeper = map(json.loads, capsys.readouterr().out.splitlines())
    assert at_own["eval/loss"] != deeper["eval/loss"]
    flags = (f"--workdir={workdir}", f"--output={tmp_path}", "--times=3")
    call(analyze, "--what=spectra", *flags)
    assert "qk/ratio" in json.loads(capsys.readouterr().out.splitlines()[0])
    call(analyze, "--what=lyapunov", *flags[:2], "--prompt=line 1")
    assert (tmp_path / "lyapunov.npz").exists()
    call(export, f"--workdir={workdir}", f"--output={tmp_path / 'layers'}")
    assert (tmp_path / "layers" / "model.safetensors").exists()
    whole = ("--form=hypernetwork", f"--output={tmp_path / 'whole'}")
    if own == "basis":  # whose functions are polynomials
        call(export, f"--workdir={workdir}", *whole)
        assert json.loads((tmp_path / "whole" / "config.json").read_text())["num_polynomials"] == 3
    else:
        with pytest.raises(InputError, match=r"can't write model.weights=examples"):
            call(export, f"--workdir={workdir}", *whole)


@pytest.mark.slow
def test_the_ends_have_weights_of_their_own():
    model = small_model(num_steps=3, **OWN["source"])
    params = nn.unbox(model.init(jax.random.key(0), jnp.zeros((1, 4), jnp.int32))["params"])

    def up_of(params, times=None):
        return model.apply({"params": params}, times, method="weights")["mlp"]["up"]["kernel"]

    end = params["source"]["ends"]["mlp"]["up"]["kernel"]
    up = up_of(params)
    np.testing.assert_array_equal(up[jnp.array([0, 2])], end)
    other = jax.tree.map(lambda x: x, params)
    other["source"]["mlp.up"]["kernel_base"] += 1.0
    np.testing.assert_allclose(up_of(other) - up, np.array([0, 1, 0])[:, None, None] + 0 * up)
    deeper = model.at_depth(6).apply({"params": params}, method="weights")["mlp"]["up"]["kernel"]
    np.testing.assert_array_equal(deeper[jnp.array([0, 5])], end)


def test_a_basis_of_ones_own():
    """Its values are NumPy's; means that it doesn't give are measured."""
    basis, t = Chebyshev(4), np.linspace(0, 1, 9)
    expected = chebyshev.chebvander(2 * t - 1, 3)
    np.testing.assert_allclose(basis(jnp.asarray(t, jnp.float32)), expected, atol=1e-6)
    # The integral of T_k^2 over [-1, 1], halved: 1/2 - 1/(2 (4 k^2 - 1)), and 1 for k = 0.
    k = np.arange(1, 4)
    assert basis.mean_square == pytest.approx(1 + (0.5 - 0.5 / (4 * k**2 - 1)).sum(), rel=1e-3)
    assert basis.mean_sum < np.sqrt(4 * basis.mean_square)
    assert basis.is_smooth(4) and not basis.is_smooth(3)


# ------------------------------------------------------------------------------ what is refused


SHELL = "subprocess:run('touch ran', shell=True)"


class Undeclared(SharedWeights):
    @nn.compact
    def __call__(self, times):
        return super().__call__(times) | {"x": {"y": self.param("y", nn.initializers.ones, (3,))}}


class WithoutEmbeddings(SharedWeights):
    @nn.compact
    def __call__(self, times):
        declare(
            self, "mixing", nn.initializers.ones, (3, 2), ("time_embed", None), "kernel", fan_in=2
        )
        return super().__call__(times)


class WithoutTimes(SharedWeights):
    def __call__(self, times):
        return jax.tree.map(lambda w: w[0], super().__call__(times))


class WithoutUp(SharedWeights):
    def __call__(self, times):
        weights = super().__call__(times)
        return {**weights, "mlp": {"down": weights["mlp"]["down"]}}


class CubedKernels(KernelsOfTime):
    """Its weights aren't linear in the e(t) that it returns."""

    def with_embeddings(self, times):
        weights, embeddings = super().with_embeddings(times)
        return jax.tree.map(lambda w: w**3, weights), embeddings


class EndsInMotion(OwnEnds):
    """Its ends are constant, and not in its derivative."""

    derivative = TimeDependentWeights.derivative


class RoundedFirst(SharedWeights):
    """Its parameters are not the weights, of which they are the thirds."""

    def __call__(self, times):
        return jax.tree.map(lambda w: 3 * w, super().__call__(times))


class LayersOfGrid(td.WeightSource):
    """It has as many sets of weights as there are steps."""

    @nn.compact
    def __call__(self, times):
        stack = self.param("weights", partial(init_stacked, self.block, self.inputs, len(times)))
        return cast_by_role(stack, block_parameters(self.block, self.inputs), self.dtype)


class FixedUp(SharedWeights):
    def __call__(self, times):
        weights = super().__call__(times)
        up = jax.tree.map(jax.lax.stop_gradient, weights["mlp"]["up"])
        return {**weights, "mlp": {**weights["mlp"], "up": up}}


class Constant(td.TimeBasis):
    count = 2

    def __call__(self, times):
        return jnp.zeros((len(times), 2))


class Miscounted(Constant):
    count = 3


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Undeclared, "has a parameter y without role and axes"),
        (WithoutEmbeddings, r"declares mixing as the P of P e\(t\).* must return that e\(t\)"),
        (WithoutTimes, r"makes attention.output.bias as bfloat16\[\d+\] for 2 times; the block"),
        (WithoutUp, "doesn't make mlp.up.bias, which the block has"),
        (FixedUp, "makes mlp.up.bias from no parameter that trains: its gradient is zero"),
        (CubedKernels, r"declares attention.output.kernel as the P of P e\(t\).* gradient isn't"),
        (EndsInMotion, "has a method derivative that returns something else than dW/dt"),
        (RoundedFirst, "says that its parameters are the weights, and makes .*; set stored = Fal"),
        (
            LayersOfGrid,
            r"num_steps=3 .* have the parameter weights.* of shape \(3, 8\) there",
        ),
    ],
)
def test_sources_that_can_not_be_trained(kind, message):
    model = small_model(num_steps=2, weights=f"{__name__}:{kind.__name__}", dtype="bfloat16")
    with pytest.raises(InputError, match=message):
        check_source(model.config, depths=(2, 3))


@pytest.mark.slow
@pytest.mark.parametrize("weights", SOURCES)
def test_our_own_sources_pass_the_same_checks(weights):
    check_source(small_model(weights=weights, dtype="bfloat16").config)


def test_a_source_that_says_it_is_smooth_is_believed():
    config = td.load_config(
        "configs/tiny.py", {"model.weights": SOURCES_OF_OTHERS["first step"][0]}
    )
    assert validation.is_smooth(config) and config.model.embedding_scale == 1


@pytest.mark.slow
def test_made_weights_are_made_in_the_dtype_of_the_run():
    relaxed = "examples.depth.relaxed_recursion:RelaxedRecursion(layers=2, rank=3)"
    model = small_model(weights=relaxed, num_steps=4, dtype="bfloat16")
    params = random_params(model)
    layers = LanguageModel(dataclasses.replace(model.config, weights="per_layer"))
    taken = {**params, "source": {"weights": discretise(model.config, params)}}
    jax.tree.map(
        np.testing.assert_array_equal,
        model.apply({"params": params}, method="weights"),
        layers.apply({"params": taken}, method="weights"),
    )
    assert make_source(model.config).flops() > 0
    assert make_source(layers.config).flops() == 0


def test_muon_needs_an_offset():
    leaf = Parameter(jnp.ones((3, 4, 4)), ("time_embed", None, None), role="kernel", fan_in=4)
    with pytest.raises(InputError, match="muon needs the parameter source/up/kernel_base, the W0"):
        kernels_of_block({"source": {"up": {"kernel": leaf}}})


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"weights": f"{__name__}:Chebyshev"}, "is no subclass of .*WeightSource; derive it"),
        (
            {"weights": SHELL},
            "is not called, because it doesn't say .*WeightSource; derive a class",
        ),
        ({"weights": f"{__name__}:FixedUp(rank=2)"}, "can't be made: .*rank"),
        ({"weights": f"{__name__}:Missing"}, "has no Missing"),
        ({"time_basis": f"{__name__}:Miscounted"}, r"count=3 functions, but gives .*\[5, 2\]"),
        ({"time_basis": f"{__name__}:Constant"}, "is zero at t in"),
        ({"time_basis": f"{__name__}:Chebyshev"}, "can't be made: .*count"),
        (
            {"time_basis": SHELL},
            "is not called, because it doesn't say .*TimeBasis; derive a class",
        ),
    ],
)
def test_names_that_stand_for_none(keys, message):
    config = ModelKeys(**keys)
    with pytest.raises(InputError, match=message):
        source_of(config), make_time_basis(config)
    assert not os.path.exists("ran")


def test_a_source_that_has_one_grid_or_none(text):
    """It can't be trained at other depths; weights of layers have no hypernetwork to go on with."""
    looped = small_config(text)
    weights, looped.model.num_steps, _ = SOURCES_OF_OTHERS["looped"]
    looped.model.weights, looped.train.depths = weights, (2, 4)
    with pytest.raises(InputError, match=r"train.depths=\(2, 4\) needs weights for other numbers"):
        run_checks("train", Config.of(looped))
    layers = small_config(text)
    layers.model.weights = "per_layer"
    given = flatten(finetune_config.get_config("hypernetwork"))
    with pytest.raises(InputError, match="per_layer weights, the run's own, have no hypernetwork"):
        complete_config(given, Config.of(layers))
    assert complete_config(given, Config.of(looped)).model.weights == weights
