"""Sequences that are split over devices: the same numbers as on one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from helpers import auto_mesh, metrics_of, rules_of, setup_of, small_config, stop_after, training_of
from jax.sharding import NamedSharding, PartitionSpec

from examples.own_block import QKNormBlock
from t5x_diffeq.cli.finetune import complete_config
from t5x_diffeq.cli.train import train_to_end
from t5x_diffeq.config.config import Config
from t5x_diffeq.data.batches import local_rows, put_on_devices
from t5x_diffeq.data.tokenizer import ByteTokenizer
from t5x_diffeq.inference.hooks import Samples
from t5x_diffeq.inference.scoring import Scorer, Sequel
from t5x_diffeq.model.attention_block import TransformerBlock
from t5x_diffeq.model.block import can_split_length
from t5x_diffeq.model.language_model import LanguageModel
from t5x_diffeq.model.layers.array_types import Places
from t5x_diffeq.model.layers.attention_kernels import causal_attention, splash_attention
from t5x_diffeq.model.layers.context import from_zigzag, to_zigzag, zigzag_order
from t5x_diffeq.system.errors import InputError
from t5x_diffeq.training.hooks import LoopPosition
from t5x_diffeq.training.partitioning import mesh_context
from t5x_diffeq.training.step import make_gradient

RULES = (("batch", "fsdp"), ("length", "context"), ("heads", "tensor"), ("head_dim", None))
LLAMA = {"architecture": "llama", "num_heads": 4, "num_kv_heads": 2}
RNG = np.random.default_rng(0)


def test_devices_hold_an_early_chunk_and_a_late_one():
    expected = [0, 1, 10, 11, 2, 3, 8, 9, 4, 5, 6, 7]
    np.testing.assert_array_equal(zigzag_order(12, 3), expected)


@pytest.mark.parametrize("shards", [2, 3, 4])
def test_tokens_are_moved_there_and_back(shards):
    tokens = jnp.arange(2 * 24).reshape(2, 24)
    state = tokens[..., None].astype(jnp.float32)
    with mesh_context(auto_mesh(context=shards), RULES):
        y, places = jax.jit(to_zigzag)(state, Places(tokens, tokens % 5))
        back = jax.jit(from_zigzag)(y)
    order = zigzag_order(24, shards)
    for found, expected in [
        (y[..., 0], tokens),
        (places.positions, tokens),
        (places.segments, tokens % 5),
        (places.order, jnp.broadcast_to(jnp.arange(24), tokens.shape)),
    ]:
        np.testing.assert_array_equal(found, expected[:, order])
    np.testing.assert_array_equal(back[..., 0], tokens)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "length"), [({"fsdp": 2, "context": 2, "tensor": 2}, 512), ({"context": 4}, 1024)]
)
def test_splash_of_own_tokens_equals_xla_of_all(mesh, length):
    """Output and gradients of the TPU's kernel, with segments and grouped queries."""
    q, k, v = (jnp.asarray(RNG.normal(size=(2, length, h, 16)), jnp.float32) for h in (4, 2, 2))
    segments = jnp.asarray(np.sort(RNG.integers(0, 4, (2, length))), jnp.int32)

    def split(*of_heads):
        in_order = Places(segments, segments)
        dealt = [to_zigzag(x.reshape(2, length, -1), in_order) for x in of_heads]
        q, k, v = (y.reshape(2, length, -1, 16) for y, _ in dealt)
        _, places = dealt[0]
        mixed = splash_attention(q, k, v, places.segments, places.order, interpret=True)
        return from_zigzag(mixed.reshape(2, length, -1)).reshape(q.shape)

    def of(attend):
        def loss(q, k, v):
            mixed = attend(q, k, v)
            return jnp.sin(mixed).sum(), mixed

        return jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))

    expected = of(lambda q, k, v: causal_attention(q, k, v, "xla", segments))(q, k, v)
    with mesh_context(auto_mesh(**mesh), RULES):
        found = of(split)(q, k, v)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


# ------------------------------------------------------------------------------ one step


def config_of(tmp_path, mesh, model, train, rules=()):
    config = small_config(tmp_path)
    config.mesh.update(mesh)
    config.mesh.rules = (*(r for r in config.mesh.rules if r[0] not in dict(rules)), *rules)
    config.model.update(model)
    config.train.update(loss_chunk=24, z_loss=0.01, **train)
    return config


def batch_of(rows=8, length=16):
    """Random tokens; each row has two documents, which end anywhere, and some unscored tokens."""
    tokens = RNG.integers(0, 256, (rows, length + 1)).astype(np.int32)
    starts = RNG.integers(1, length, (rows, 1))
    index = np.arange(length, dtype=np.int32)
    segments = (index >= starts).astype(np.int32)
    return {
        "inputs": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "mask": (RNG.random((rows, length)) < 0.8).astype(np.float32),
        "segments": segments,
        "positions": (index - segments * starts).astype(np.int32),
    }


def random_params(setup):
    """Every leaf random, laid out as the setup says."""
    rng = np.random.default_rng(1)
    return jax.tree.map(
        lambda x: jax.device_put(0.1 * rng.normal(size=x.shape).astype(x.dtype), x.sharding),
        setup.abstract_state.params,
    )


def logits_and_gradient(setup, batch):
    def both(params, batch):
        of_batch = make_gradient(setup.model, setup.trains, setup.config.train)
        found = of_batch(params, batch, jax.random.key(0))
        logits = nn.apply(LanguageModel.__call__, setup.model)({"params": params}, batch["inputs"])
        return logits, found.metrics, found.norm, found.gradient

    batch = jax.device_put(batch, setup.batch_sharding)
    with setup.context():
        return jax.device_get(jax.jit(both)(random_params(setup), batch))


CASES = {
    "gpt": ({"fsdp": 2, "context": 2, "tensor": 2}, {}, {}, ()),
    "llama": (
        {"fsdp": 2, "context": 4},
        {**LLAMA, "scheme": "heun", "remat": "full"},
        {"microbatches": 2},
        (),
    ),
    "baseline": (
        {"fsdp": 2, "context": 2, "tensor": 2},
        {**LLAMA, "weights": "per_layer", "scheme": "strang", "step_size": "1"},
        {},
        (("embed", ("fsdp", "context")),),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_logits_loss_and_gradients_equal_one_device(tmp_path, case, capfd):
    mesh, model, train, rules = CASES[case]
    batch = batch_of()
    alone = setup_of(config_of(tmp_path, {}, model, train), devices=jax.devices()[:1])
    split = setup_of(config_of(tmp_path, mesh, model, train, rules))
    assert split.mesh.shape["context"] == mesh["context"]
    found, expected = logits_and_gradient(split, batch), logits_and_gradient(alone, batch)
    assert max(np.abs(x).max() for x in jax.tree.leaves(expected[-1])) > 1e-2
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-5)
    assert "Involuntary full rematerialization" not in capfd.readouterr().err


# ------------------------------------------------------------------------------ whole runs


@pytest.mark.slow
@pytest.mark.in_turns("trainings")
def test_a_run_with_split_sequences_equals_one_without(small, tmp_path):
    """Training and evaluation, stopped on eight devices and continued on one."""
    small.mesh.fsdp = 1
    assert train_to_end(Config.of(small), tmp_path / "alone") == 0
    split = small.copy_and_resolve_references()
    split.mesh.update(fsdp=2, context=2, tensor=2)
    assert stop_after(3, Config.of(split), tmp_path / "split") == 42
    assert train_to_end(Config.of(small), tmp_path / "split") == 0
    found, expected = (metrics_of(tmp_path / name) for name in ("split", "alone"))
    for name in ("train/loss", "train/grad_norm", "eval/loss"):
        ours, theirs = ([line[name] for line in run if name in line] for run in (found, expected))
        assert len(ours) == len(theirs) > 1
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


@pytest.mark.slow
@pytest.mark.in_turns("trainings")
def test_text_is_generated_and_scored_as_on_one_device(tmp_path):
    """Rows are then whole, and the axis splits the batch."""
    sequels = [Sequel(RNG.integers(0, 256, n).tolist(), 5) for n in (9, 50, 120)]
    prompts = {"sample_every": 1, "sample_prompts": ("", "def")}
    found = []
    for mesh, devices in [({}, 1), ({"fsdp": 2, "context": 2}, 4)]:
        config = config_of(tmp_path, mesh, {}, prompts)
        config.data.sequence_length = 128
        setup = setup_of(config, devices=jax.devices()[:devices])
        params = random_params(setup)
        with setup.context():
            training = training_of(setup, tmp_path, ByteTokenizer())
            Samples(training).run(LoopPosition(0, setup.init_state().replace(params=params), 0))
        _, texts = training.writer.write_texts.call_args.args
        found.append((texts, Scorer(setup, params, 4)(sequels)))
    (texts, scores), (split_texts, split_scores) = found
    assert split_texts == texts and len(texts["sample/1"]) > 3
    for a, b in zip(split_scores, scores, strict=True):
        assert a.loglikelihood == pytest.approx(b.loglikelihood, abs=1e-4) and a.greedy == b.greedy


# ------------------------------------------------------------------------------ data


def test_devices_get_their_rows_and_columns():
    """A process reads the rows that its devices hold, and puts on each its part of their tokens."""
    mesh = auto_mesh(fsdp=2, context=4)
    sharding = NamedSharding(mesh, PartitionSpec("fsdp", "context"))
    np.testing.assert_array_equal(local_rows(sharding, 6), np.arange(6))
    rows, sizes = np.arange(48, dtype=np.int32).reshape(6, 8), np.arange(6, dtype=np.int32)
    batch = put_on_devices({"inputs": rows, "bytes": sizes}, np.arange(6), 6, sharding)
    assert batch["inputs"].sharding.is_equivalent_to(sharding, 2)
    for shard in batch["inputs"].addressable_shards:
        assert shard.data.shape == (3, 2)
        np.testing.assert_array_equal(shard.data, rows[shard.index])
    np.testing.assert_array_equal(batch["bytes"], sizes)


def test_tuning_may_have_longer_sequences(tmp_path):
    pretrained = Config.of(config_of(tmp_path, {}, LLAMA, {}))
    scaling = ("linear", 4.0)
    changes = {"data.sequence_length": 64, "model.rope_scaling": scaling, "mesh.context": 4}
    tuned = complete_config(Config().flat() | changes, pretrained)
    assert (tuned.data.sequence_length, tuned.model.rope_scaling) == (64, scaling)
    assert tuned.model.num_kv_heads == 2  # the run's


# ------------------------------------------------------------------------------ bad input


class OwnAttention(TransformerBlock):
    """A block whose f may not heed the order of tokens."""

    def f(self, y, places, deterministic=True):
        return super().f(y, places, deterministic)


def test_blocks_say_that_they_split_sequences():
    assert can_split_length(TransformerBlock)
    assert not can_split_length(OwnAttention)
    assert not can_split_length(QKNormBlock)


@pytest.mark.parametrize(
    ("model", "length", "mesh", "message"),
    [
        ({}, 18, {"context": 2}, r"data.sequence_length=18 is not divisible by 4, .*mesh.context"),
        (
            {"block": "examples.own_block:QKNormBlock"},
            16,
            {"context": 2},
            r"mesh.context=2 splits sequences, and the block .*QKNorm.*set mesh.context=1",
        ),
        ({}, 16, {"context": 0}, "mesh axes are .*context 0.*at least 1"),
        ({}, 16, {"context": 16}, "16"),
    ],
)
def test_what_cannot_be_split(tmp_path, model, length, mesh, message):
    config = small_config(tmp_path)
    config.model.update(model)
    config.data.sequence_length = length
    config.mesh.update(mesh)
    with pytest.raises(InputError, match=message):
        setup_of(config)


def test_the_length_lies_on_context_alone(tmp_path):
    config = small_config(tmp_path)
    config.mesh.context = 2
    assert dict(rules_of(config))["length"] == "context"
    config.mesh.rules = (("length", "tensor"),)
    with pytest.raises(InputError, match="only the logical axes vocab"):
        rules_of(config)
