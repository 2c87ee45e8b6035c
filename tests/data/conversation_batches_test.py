"""Instruction data on its way from files to batches, and what the model learns from it."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chats import CHATML, MARKED, chat_tokenizer_of
from clu import metrics as clu_metrics
from helpers import corpus_of, small_config, train_config
from small_models import random_params
from small_models import small as small_model

from t5x_diffeq.cli.prepare_data import prepare_data
from t5x_diffeq.config.config import DataKeys
from t5x_diffeq.data import shards
from t5x_diffeq.data.batches import train_dataset
from t5x_diffeq.data.corpus import prepare_corpus
from t5x_diffeq.data.examples import eval_examples, train_examples
from t5x_diffeq.data.packing import FirstFitRows, Windows
from t5x_diffeq.data.recipe import adopt_tokenizer
from t5x_diffeq.data.tokenizer import Border, ByteTokenizer
from t5x_diffeq.system.errors import InputError
from t5x_diffeq.training.evaluation import EvalMetrics, evaluate_loss
from t5x_diffeq.training.step import make_gradient

END = 0  # of bytes
PAIRS = [(f"[question {n}?]", f"answer {n * n}") for n in range(40)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Forty pairs, a record to skip, and a template."""
    path = tmp_path_factory.mktemp("pairs")
    lines = [json.dumps({"prompt": p, "completion": c}) for p, c in PAIRS]
    lines.insert(3, json.dumps({"prompt": "nothing follows", "completion": ""}))
    (path / "a.jsonl").write_text("\n".join(lines))
    (path / "chat.jinja").write_text(CHATML)
    return path


@pytest.fixture
def config(folder):
    config = small_config(folder / "a.jsonl")
    config.data.loss_on = "completion"
    config.data.sequence_length = 32
    config.mesh.fsdp = 1
    return config


def check_masks(batches):
    """What counts is of completions, what doesn't is of prompts, by letters that only they have."""
    for batch in batches:
        counts = batch["mask"] > 0
        assert counts.any()
        assert not set(ByteTokenizer().decode(batch["targets"][counts])) & set("[quio?]")
        assert not set(ByteTokenizer().decode(batch["targets"][~counts])) & set("awr\0")
        assert batch["inputs"].min() >= 0


def test_concatenated_and_split(config, tmp_path, capsys):
    corpus = corpus_of(config.data, tmp_path, new=True)
    told = capsys.readouterr().err
    assert "skipped documents: 1 with an empty completion" in told
    trained = sum(len(c) + 1 for _, c in PAIRS[:36])
    assert f"({trained} with a loss)" in corpus.amount("train")
    assert "template: none" in told
    examples = Windows(corpus.parts[0].train, 32, "train", Border(END, END))
    text = "".join(f"{p}{c}\0" for p, c in PAIRS)
    counts = "".join("." * len(p) + "x" * (len(c) + 1) for p, c in PAIRS)
    for k in range(len(examples)):
        window = examples[k]
        at = slice(32 * k, 32 * k + 32)
        assert "".join(map(chr, window["inputs"])) == ("\0" + text)[at]
        expected = counts[at]
        assert "".join(np.where(window["mask"] > 0, "x", ".")) == expected
        starts = np.flatnonzero(np.diff(window["segments"])) + 1
        assert all(window["inputs"][s] == END for s in starts)
    (validation,) = eval_examples(DataKeys(**config.data), corpus)
    counted = sum(int(validation[k]["mask"].sum()) for k in range(len(validation)))
    assert counted == sum(len(c) + 1 for _, c in PAIRS[36:])


def test_first_fit(config, tmp_path):
    corpus = corpus_of(config.data, tmp_path, new=True)
    rows = FirstFitRows(corpus.parts[0].train, 64, "train", seed=0, border=Border(END, END))
    found = []
    for k in range(len(rows)):
        row = rows[k]
        for segment in range(row["segments"].max() + 1):
            inside = row["segments"] == segment
            targets = ByteTokenizer().decode(row["targets"][inside])
            counts = row["mask"][inside]
            if not counts.any():
                continue  # padding
            number = targets.index("]") + 1
            assert targets[:number].startswith("[question")
            assert counts.tolist() == [0] * number + [1] * (len(targets) - number)
            found.append((targets[:number], targets[number:-1]))
    assert sorted(found) == sorted(PAIRS[:36])


def test_shards_hold_the_masks(config, tmp_path, capsys):
    """And so do mixtures of them; those of whole texts don't pass for them, nor the reverse."""
    direct = corpus_of(config.data, tmp_path / "direct", new=True)
    made = tmp_path / "made"
    prepare_data(DataKeys(**config.data), made, shards=2, workers=1, part=(0, 1))
    told = capsys.readouterr().err
    assert "--config.data.loss_on=completion" in told and "tokens have a loss" in told
    manifest = json.loads((made / "manifest.json").read_text())
    assert manifest["masks"] and manifest["train"]["trained_tokens"] < manifest["train"]["tokens"]
    config.data.update(source="tokens", path=str(made))
    sharded = corpus_of(config.data, tmp_path / "sharded", new=True)
    windows = [
        Windows(each.parts[0].train, 32, "train", Border(END, END), seed=1)
        for each in (direct, sharded)
    ]
    assert len(windows[0]) == len(windows[1]) > 10
    for k in range(len(windows[0])):
        jax.tree.map(np.testing.assert_array_equal, windows[0][k], windows[1][k])
    np.testing.assert_array_equal(sharded.parts[0].train[0], direct.parts[0].train[0])
    config.data.update(source="mixture", mixture=((1, "tokens", str(made)),) * 2, path=None)
    mixed = corpus_of(config.data, tmp_path / "mixed", new=True)
    examples = train_examples(DataKeys(**config.data), mixed, 8, 0)
    check_masks([train_dataset(examples, 8, 0, np.arange(8))[step] for step in range(4)])
    config.data.loss_on = "all"
    with pytest.raises(InputError, match=r"loss_on=all: the shards in .* with data.loss_on=compl"):
        corpus_of(config.data, tmp_path / "refused", new=True)
    config.data.update(loss_on="completion", chat_template="a.jinja")
    with pytest.raises(InputError, match=r"chat_template=a.jinja .*: prepare_data has already"):
        corpus_of(config.data, tmp_path / "refused", new=True)


def test_shards_of_whole_texts_hold_no_masks(config, tmp_path):
    (tmp_path / "text.txt").write_text("some words\n" * 50)
    config.data.update(loss_on="all", path=str(tmp_path / "text.txt"))
    corpus_of(config.data, tmp_path / "run", new=True)
    made = tmp_path / "run" / "data" / "0"
    assert "masks" not in json.loads((made / "manifest.json").read_text())
    config.data.update(source="tokens", path=str(made))
    folder = tmp_path / "tuned" / "tokenizer"
    pretrained = chat_tokenizer_of("bytes")
    pretrained.imported = {"config.json": {"eos_token_id": [0, 58]}}
    adopt_tokenizer(pretrained, folder, DataKeys(**config.data))
    tuned = prepare_corpus(DataKeys(**config.data), tmp_path / "tuned", True, tuned=True)
    assert tuned.tokenizer.chat.template == MARKED  # that of the run in init_from
    assert tuned.tokenizer.stops == {0, 58}
    config.data.loss_on = "completion"
    with pytest.raises(InputError, match=r"on=completion: the shards in .* with data.loss_on=all"):
        corpus_of(config.data, tmp_path / "refused", new=True)
    manifest = json.loads((made / "manifest.json").read_text())
    (made / "manifest.json").write_text(json.dumps({**manifest, "masks": True}))
    with pytest.raises(InputError, match=r"train lacks 'trained_tokens'"):
        shards.ShardedDocuments(made, "train")


def test_conversations_longer_than_a_sequence_are_counted(config, tmp_path, capsys):
    config.data.sequence_length = 8
    corpus = corpus_of(config.data, tmp_path, new=True)
    train_examples(DataKeys(**config.data), corpus, 4, 0)
    told = capsys.readouterr().err
    assert "36 of 36 conversations are longer than data.sequence_length=8 and are cut" in told


def test_a_template_is_part_of_the_data(config, folder, tmp_path, capsys):
    config.data.chat_template = str(folder / "chat.jinja")
    corpus = corpus_of(config.data, tmp_path, new=True)
    assert corpus.tokenizer.chat.template == CHATML
    assert f"template: {tmp_path}/tokenizer/chat_template.jinja" in capsys.readouterr().err
    corpus_of(config.data, tmp_path, new=False)
    (tmp_path / "tokenizer" / "chat_template.jinja").write_text(MARKED)
    with pytest.raises(InputError, match="restore that data or choose a new --workdir"):
        corpus_of(config.data, tmp_path, new=False)


# ---------------------------------------------------------------- training


def batch_of(mask):
    random = np.random.default_rng(0)
    inputs, targets = random.integers(0, 50, (2, 2, 10)).astype(np.int32)
    return {"inputs": inputs, "targets": targets, "mask": np.asarray(mask, np.float32)}


@pytest.mark.slow
def test_the_gradient_does_not_depend_on_targets_that_do_not_count():
    model = small_model(weights="per_layer", num_steps=1)
    params, key = random_params(model), jax.random.key(0)
    keys = train_config(loss_chunk=32, microbatches=2, z_loss=0.1)
    gradient = jax.jit(make_gradient(model, lambda part: True, keys))
    mask = np.zeros((2, 10))
    mask[0, 4:7] = 1  # the second microbatch has none
    batch = batch_of(mask)
    others = {**batch, "targets": np.where(mask > 0, batch["targets"], 7).astype(np.int32)}
    expected, *rest = gradient(params, batch, key)[:3]
    found, *same = gradient(params, others, key)[:3]
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert rest == same and rest[1]["loss"] > 0
    moved = {**batch, "targets": np.where(mask > 0, 7, batch["targets"]).astype(np.int32)}
    assert gradient(params, moved, key)[2]["loss"] != rest[1]["loss"]
    nothing = gradient(params, batch_of(np.zeros((2, 10))), key)[:3]
    assert all(not np.asarray(leaf).any() for leaf in jax.tree.leaves(nothing))  # and no NaN


def test_an_evaluation_without_a_token_that_counts_is_refused():
    nothing = EvalMetrics(clu_metrics.Average(jnp.zeros(()), jnp.zeros(())), None)
    with pytest.raises(InputError, match=r"no token of the evaluated .* raise train.eval_batches"):
        evaluate_loss(lambda params, batch: nothing, {}, iter([{}]))
