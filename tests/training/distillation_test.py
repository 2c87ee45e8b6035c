"""Distillation: the loss and its gradient, runs with a teacher, and teachers that can't be used."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, auto_mesh, setup_of, small_config, stop_after, train_config
from small_models import random_params, uneven_batch
from small_models import small as small_model

from t5x_diffeq.checkpoints.workdir import save_config
from t5x_diffeq.cli.train import train_to_end
from t5x_diffeq.config.config import Config
from t5x_diffeq.data.file_tokenizers import HuggingFaceTokenizer
from t5x_diffeq.data.tokenizer import ByteTokenizer
from t5x_diffeq.system.errors import InputError
from t5x_diffeq.training.checks import run_checks
from t5x_diffeq.training.partitioning import mesh_context
from t5x_diffeq.training.step import lower_train_step, make_gradient
from t5x_diffeq.training.teacher import check_teacher, check_teachers_tokenizer
from t5x_diffeq.training.tracking.jsonl import read_metrics

BATCH = uneven_batch(np.random.default_rng(0), 8)
RULES = (("batch", "fsdp"), ("embed", "fsdp"), ("vocab", "tensor"), ("mlp", "tensor"))
WEIGHT = 0.75

# A teacher of another architecture, width, number of layers and length than the student.
TEACHER = small_model(
    architecture="llama",
    weights="per_layer",
    num_kv_heads=2,
    num_steps=2,
    embed_dim=24,
    max_length=12,
    scheme="lie_trotter",
    step_size="1",
)
THEIRS = random_params(TEACHER, seed=1)


def gradient(student, microbatches=1, mesh=None, depths=None, teacher=TEACHER, theirs=THEIRS):
    of_batch = make_gradient(
        student,
        lambda part: True,
        train_config(microbatches=microbatches, loss_chunk=32, distill_weight=WEIGHT),
        depths,
        teacher,
    )
    arguments = random_params(student), BATCH, jax.random.key(0), theirs
    if mesh is None:
        return jax.jit(of_batch)(*arguments)[:3]
    with mesh_context(mesh, RULES):
        return jax.jit(of_batch)(*arguments)[:3]


def plain(student, depths):
    """The means, and the gradient of the weighted loss, from all logits."""

    def mean(x):
        return (x * BATCH["mask"]).sum() / BATCH["mask"].sum() / len(depths)

    def whole(params):
        theirs = jax.nn.log_softmax(TEACHER.apply({"params": THEIRS}, BATCH["inputs"])[..., :50])
        loss = kl = 0.0
        for depth in depths:
            logits = student.at_depth(depth).apply({"params": params}, BATCH["inputs"])
            ours = jax.nn.log_softmax(logits[..., :50])
            loss -= mean(jnp.take_along_axis(ours, BATCH["targets"][..., None], -1)[..., 0])
            kl += mean((jnp.exp(theirs) * (theirs - ours)).sum(-1))
        return (1 - WEIGHT) * loss + WEIGHT * kl, {"loss": loss, "distillation": kl}

    return jax.jit(jax.grad(whole, has_aux=True))(random_params(student))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("microbatches", "depths", "mesh"),
    [(2, None, None), (4, (2, 3), None), (2, None, {"fsdp": 4, "tensor": 2})],
)
def test_it_is_the_gradient_of_the_weighted_loss(microbatches, depths, mesh):
    student = small_model()
    expected, means = plain(student, depths or (3,))
    found, norm, same_means = gradient(
        student, microbatches, auto_mesh(**mesh) if mesh else None, depths
    )
    assert_close(found, expected)
    squares = sum(np.square(leaf).sum() for leaf in jax.tree.leaves(jax.device_get(expected)))
    np.testing.assert_allclose(norm, np.sqrt(squares), rtol=1e-5)
    assert same_means.keys() == means.keys()
    for name, value in means.items():
        np.testing.assert_allclose(same_means[name], value, rtol=1e-5)


# ------------------------------------------------------------------------------- whole runs


@pytest.mark.slow
@pytest.mark.in_turns("whole programs")
def test_a_teacher_on_a_mesh_after_a_resume(finished, text, tmp_path, capsys):
    """Loaded again, and sharded over its own width and vocabulary, it says the same."""
    config = small_config(text)
    config.mesh.fsdp = 1
    config.model.num_steps = 3
    config.train.update(distill_from=str(finished[1]), eval_every=6, eval_batches=1)
    one, eight = tmp_path / "one", tmp_path / "eight"
    assert train_to_end(Config.of(config), one) == 0
    assert f"learns from {finished[1]} at its step 6" in capsys.readouterr().err
    assert stop_after(2, Config.of(config), eight) == 42
    config.mesh.update(data=2, fsdp=2, tensor=2)
    assert train_to_end(Config.of(config), eight) == 0
    of_one, of_eight = (
        [line["train/distillation"] for line in read_metrics(workdir) if "train/loss" in line]
        for workdir in (one, eight)
    )
    assert len(of_one) == 6 and min(of_one) > 0
    assert of_one[-1] != of_one[0]
    np.testing.assert_allclose(of_eight, of_one, atol=1e-5)
    other = Config.of(config).with_values({"train.distill_weight": 1.0})
    with pytest.raises(InputError, match=r"train\.distill_weight was 0\.5, is 1\.0"):
        train_to_end(other, eight)


# ------------------------------------------------------------------------------- refusals


@pytest.fixture
def teacher(small, tmp_path):
    """A workdir with all but checkpoints, of sequences of 16 tokens."""
    workdir = tmp_path / "teacher"
    workdir.mkdir()
    save_config(Config.of(small), workdir, "run")
    ByteTokenizer().save(workdir / "tokenizer")
    return workdir


def test_teachers_that_cant_be_used(small, teacher, tmp_path):
    small.train.distill_from = str(tmp_path / "nowhere")
    with pytest.raises(InputError, match="nowhere holds no run: there is no such folder"):
        train_to_end(Config.of(small), tmp_path / "run")
    small.train.distill_from = str(teacher)
    with pytest.raises(InputError, match="teacher holds no checkpoint"):
        train_to_end(Config.of(small), tmp_path / "run")
    small.data.sequence_length = 17
    with pytest.raises(InputError, match=r"data\.sequence_length=17 is longer than the 16 tokens"):
        check_teacher(Config.of(small))
    small.train.distill_weight = 1.5
    with pytest.raises(InputError, match=r"distill_weight is 1\.5; it must be in \[0, 1\]"):
        Config.of(small)
    assert not (tmp_path / "run").exists()


def test_a_teacher_with_another_tokenizer(small, teacher):
    import tokenizers

    small.train.distill_from = str(teacher)
    config = Config.of(small)

    def check_corpus(tokenizer):
        run_checks("train", config, None, SimpleNamespace(tokenizer=tokenizer))

    check_corpus(ByteTokenizer())
    bpe = tokenizers.ByteLevelBPETokenizer()
    bpe.train_from_iterator(["some text"], vocab_size=300, special_tokens=["<|endoftext|>"])
    with pytest.raises(InputError, match=r"train\.distill_from=.*has another tokenizer"):
        check_corpus(HuggingFaceTokenizer(bpe.to_str().encode()))
    (teacher / "tokenizer").rename(teacher / "lost")
    with pytest.raises(InputError, match=r"has lost its tokenizer/; restore it"):
        check_corpus(ByteTokenizer())


def test_without_a_teacher_nothing_is_compiled_or_checked(small, teacher):
    config = Config.of(small)
    check_teacher(config)
    check_teachers_tokenizer(config, ByteTokenizer())
    small.train.distill_from = str(teacher)
    setup = setup_of(small)
    with pytest.raises(InputError, match="only train and finetune compile a step with a teacher"):
        lower_train_step(setup, 8)
