"""Structures of depth in examples/depth go through every verb, and are split over devices."""

import json
import shlex
from dataclasses import replace

import jax
import numpy as np
import pytest
from helpers import ROOT, assert_close, assert_learns_and_resumes, call, setup_of, small_config
from small_models import TOKENS, random_params, small, uneven_batch

import t5x_diffeq as td
from configs import finetune as finetune_config
from t5x_diffeq.cli import analyze, evaluate, export, generate, plan
from t5x_diffeq.cli.finetune import finetune
from t5x_diffeq.config.config import Config, flatten
from t5x_diffeq.hf.families import family_of
from t5x_diffeq.inference.explorer.answers import Explorer
from t5x_diffeq.model.config import ModelConfig
from t5x_diffeq.model.flops import forward_flops
from t5x_diffeq.model.language_model import in_one_document
from t5x_diffeq.model.ode.solvers import SCHEMES, find_scheme, lie_trotter
from t5x_diffeq.model.ode.sources import SOURCES
from t5x_diffeq.model.plugin_checks import check_block, check_source
from t5x_diffeq.model.scheme_checks import check_scheme
from t5x_diffeq.planner.topology import make_topology
from t5x_diffeq.system.errors import InputError
from t5x_diffeq.training.step import make_gradient
from t5x_diffeq.training.watch import sizes

_FLAG = "--config.model."
_PARALLEL = "t5x_diffeq.model.parallel_block:ParallelBlock"


def _keys_of(file) -> dict[str, str]:
    """The keys of `config.model` that the file says to set."""
    line = next(x for x in file.read_text().splitlines() if x.startswith(f"    {_FLAG}"))
    return dict(word.removeprefix(_FLAG).split("=", 1) for word in shlex.split(line))


STRUCTURES = {
    file.stem: _keys_of(file)
    for file in sorted((ROOT / "examples" / "depth").glob("*.py"))
    if file.stem != "__init__"
}


def config_of(name, text):
    """A small run of four steps, whose leaves are functions of t unless the file names a source."""
    config = small_config(text)
    config.model.update(num_steps=4, **STRUCTURES[name])
    config.train.update(total_steps=4, eval_every=2, on_spike="nothing")
    config.optimizer.learning_rate = 2e-2
    return config


# ------------------------------------------------------------------------------ checks


def _check(check, text, *depths, **keys):
    model = replace(Config.of(small_config(text)).model, num_steps=4, **keys)
    check(ModelConfig.of(model, 50, 16), *depths)


@pytest.mark.parametrize("name", SCHEMES)
def test_built_in_schemes_pass_the_checks_of_plugins(name, text):
    _check(check_scheme, text, scheme=name)


@pytest.mark.parametrize("keys", [{"architecture": "llama"}, {}, {"block": _PARALLEL}], ids=str)
def test_built_in_blocks_pass_the_checks_of_plugins(keys, text):
    _check(check_block, text, **keys)


@pytest.mark.slow
@pytest.mark.parametrize("name", SOURCES)
def test_built_in_sources_pass_the_checks_of_plugins(name, text):
    _check(check_source, text, () if name == "per_layer" else (2, 6), weights=name)


same_layer = td.Scheme(lie_trotter, (1.0,), order=1, evaluations=(1, 1), layer="sequential")


def test_what_a_scheme_says_decides_and_not_its_name(text):
    """Export writes the class of transformers for any scheme of that layer."""
    keys = replace(Config.of(small_config(text)).model, scheme=f"{__name__}:same_layer")
    config = ModelConfig.of(keys, 50, 16)
    check_scheme(config)
    assert family_of(config)[1].model_class == "GPT2LMHeadModel"
    assert family_of(replace(config, scheme="euler")) is None


@pytest.mark.parametrize("name", ["averages_over_depth", "momentum"])
def test_the_watched_states_are_those_of_the_trajectory(name):
    """Of a memory that grows, and of one that doesn't."""
    model = small(weights="per_layer", **STRUCTURES[name])
    params, places = {"params": random_params(model)}, in_one_document(TOKENS)

    @jax.jit
    def both(params):
        bound = model.bind(params)
        W, y = bound.weights(), bound.embed(TOKENS, places)
        return sizes(model.config, W, y, places), bound.trajectory(TOKENS, W)

    curves, states = both(params)
    np.testing.assert_allclose(curves["state"], np.square(states).mean((1, 2, 3)) ** 0.5, rtol=1e-5)
    assert curves["f"].shape == curves["g"].shape == (3,)


def test_the_products_of_a_scheme_are_counted():
    """A loop multiplies the embedded tokens by a matrix of its own, in each of three steps."""
    loop, plain = small(**STRUCTURES["loop"]).config, small(weights="shared").config
    D = plain.embed_dim
    assert forward_flops(loop) - forward_flops(plain) == 3 * 2 * D * D


# ------------------------------------------------------------------------------ devices


def _loss_and_gradient(config, devices):
    setup = setup_of(config, 50, devices)
    shardings = jax.tree.map(lambda x: x.sharding, setup.abstract_state.params)
    of_batch = make_gradient(setup.model, setup.trains, setup.train_config)
    with setup.context():
        params = jax.device_put(random_params(setup.model), shardings)
        batch = jax.device_put(uneven_batch(np.random.default_rng(0), 8), setup.batch_sharding)
        gradient, _, means, *_ = jax.jit(of_batch)(params, batch, jax.random.key(0))
    return means["loss"], jax.device_get(gradient)


@pytest.mark.slow
def test_eight_devices_equal_one(sample, text):
    """The loss and the gradient, by leaves that are all random."""
    for name in sample(STRUCTURES, 1):
        config = config_of(name, text)
        config.model.dtype = "float32"
        config.data.sequence_length = 10
        loss, gradient = _loss_and_gradient(config, jax.devices()[:1])
        config.mesh.update(data=2, fsdp=2, tensor=2)
        on_eight, found = _loss_and_gradient(config, None)
        np.testing.assert_allclose(on_eight, loss, rtol=1e-5, err_msg=name)
        assert_close(found, gradient)


# ------------------------------------------------------------------------------ verbs


@pytest.mark.slow
def test_every_verb(sample, text, tmp_path, capsys, whole):
    """One structure by one optimizer; with --whole all by both, and what compiles for long."""
    for name in sample(STRUCTURES, 1):
        folder = tmp_path / name
        for optimizer in sample(("adam", "muon"), 1):
            config, workdir = config_of(name, text), folder / optimizer
            config.optimizer.name = optimizer
            assert_learns_and_resumes(config, workdir)
        run, scheme = td.load(workdir), find_scheme(config.model.scheme)
        check_evaluate(run, workdir, capsys)
        check_explore(run)
        check_export(run, workdir, folder / "exported")
        if scheme.remembers:
            with pytest.raises(
                InputError, match=r"of steps from state to state, .* also remembers"
            ):
                call(analyze, "--what=all", f"--workdir={workdir}", f"--output={folder}")
            assert not (folder / "spectra.html").exists()
        if whole:
            check_what_compiles_for_long(config, workdir, text, folder)


def check_evaluate(run, workdir, capsys):
    """Also with fewer steps, for which a scheme or a source may not exist; and generation."""
    capsys.readouterr()
    call(evaluate, f"--workdir={workdir}", "--batch_size=16")
    loss = json.loads(capsys.readouterr().out)["eval/loss"]
    fewer = (evaluate, f"--workdir={workdir}", "--num_steps=2", "--batch_size=16")
    if run.run.placed.model.config.any_num_steps:
        call(*fewer)
        assert json.loads(capsys.readouterr().out)["eval/loss"] != loss
    else:
        with pytest.raises(InputError, match=r"num_steps=2.* exist"):
            call(*fewer)
    call(generate, f"--workdir={workdir}", "--prompt=line", "--max_tokens=2")
    assert capsys.readouterr().out.startswith("line")


def check_explore(run):
    """What the explorer offers exists, and it reads what the model computes."""
    explorer, model = Explorer("run", run), run.run.placed.model
    assert (2 in explorer.offered) == model.config.any_num_steps
    for scheme in explorer.schemes:
        for num_steps in explorer.offered[:2]:
            model.at_depth(num_steps, scheme)
    read = explorer.read("line 1", (4, explorer.schemes[0]))
    assert read["mean_loss"] == pytest.approx(run.loss("line 1"), rel=1e-3)


def check_export(run, workdir, folder):
    """Only a scheme whose step is a layer of transformers can be exported."""
    verb = (export, f"--workdir={workdir}", f"--output={folder}")
    if find_scheme(run.config.model.scheme).layer is None:
        with pytest.raises(InputError, match=r"can't be exported, because its step isn't a layer"):
            call(*verb)
    else:
        call(*verb)
        assert (folder / "model.safetensors").exists()


def check_what_compiles_for_long(config, workdir, text, folder):
    """The analyses that exist, tuning on the own grid with watched curves, and a plan."""
    remembers = find_scheme(config.model.scheme).remembers
    for kind in ("spectra",) if remembers else ("spectra", "lyapunov"):
        few = ["--times=3"] if kind == "spectra" else []
        call(analyze, f"--what={kind}", f"--workdir={workdir}", f"--output={folder}", *few)
        assert (folder / f"{kind}.html").exists()
    call(analyze, "--interactive", f"--workdir={workdir}", f"--output={folder}")
    for method in ("lora", "full"):
        tuned = finetune_config.get_config(method)
        tuned.update(init_from=str(workdir))
        tuned.data.update(source="text_files", path=str(text))
        tuned.train.update(total_steps=1, batch_size=8, eval_batch_size=16, watch_every=1)
        assert finetune(flatten(tuned), folder / method) == 0
    assert plan.make_plan("structure", Config.of(config), make_topology("cpu:1", 1)).cost
