"""Instruction data: which tokens are trained on, whatever way they take to a batch."""

import json
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chats import CHATML, HEADERS, INSTRUCT, MARKED, TWO_TURNS, chat_tokenizer_of
from clu import metrics as clu_metrics
from helpers import corpus_of, small_config, train_keys
from row import Row
from small_models import random_params
from small_models import small as small_model

from t5x_diffeq.data import shards, streams
from t5x_diffeq.data.conversations import conversation_of
from t5x_diffeq.data.encoding import ConversationEncoder, TextEncoder
from t5x_diffeq.data.examples import eval_examples, train_examples
from t5x_diffeq.data.offsets import encode_with_offsets
from t5x_diffeq.data.packing import FirstFitRows, Windows
from t5x_diffeq.data.pipeline import train_dataset
from t5x_diffeq.data.preparation import tokenise_documents
from t5x_diffeq.data.recipe import adopt_tokenizer
from t5x_diffeq.data.sources import _RecordTexts, load_source
from t5x_diffeq.data.token_codes import encode_tokens, is_trained, tokens_of
from t5x_diffeq.data.tokenizer import ByteTokenizer
from t5x_diffeq.runtime.config import Config, DataKeys
from t5x_diffeq.runtime.errors import InputError
from t5x_diffeq.training.evaluation import evaluate_loss
from t5x_diffeq.training.gradient import make_gradient
from t5x_diffeq.training.step import EvalMetrics
from t5x_diffeq.verbs.prepare_data import prepare_data

END = 0  # of bytes


def codes_of(record, tokenizer):
    """The codes of one record as they are stored."""
    document, skipped = conversation_of(record, "here"), Counter()
    found = list(tokenise_documents([document], ConversationEncoder(tokenizer), skipped))
    return found[0] if found else skipped


def runs(codes, tokenizer):
    """The text in pieces that alternate between what is read only and what is trained on."""
    tokens, trained = tokens_of(codes), is_trained(codes)
    cuts = np.flatnonzero(np.diff(trained)) + 1
    return [tokenizer.decode(part) for part in np.split(tokens, cuts)]


# ---------------------------------------------------------------- which tokens


@pytest.mark.parametrize("kind", ["bytes", "json", "sentencepiece"])
def test_of_a_prompt_and_its_completion_the_completion_is_trained_on(kind):
    tokenizer = chat_tokenizer_of(kind)
    codes = codes_of({"prompt": "Say é:\n", "completion": "日本 ok", "id": 3}, tokenizer)
    assert codes[-1] == tokenizer.end_of_text  # the model learns to stop
    assert runs(codes[:-1], tokenizer) == ["Say é:\n", "日本 ok"]
    assert codes.dtype == "<i4"
    spaced = codes_of({"prompt": "Say: ", "completion": "qz"}, tokenizer)
    assert runs(spaced[:-1], tokenizer) == ["Say: ", "qz"]


@pytest.mark.parametrize(
    ("template", "read", "end"),
    [
        (CHATML, "<|im_end|>\n", ""),
        (MARKED, "<|im_end|>", "\n"),
    ],
    ids=["by prefixes", "by generation blocks"],
)
@pytest.mark.parametrize("kind", ["bytes", "json", "sentencepiece"])
def test_of_several_turns_every_answer_is_trained_on(kind, template, read, end):
    tokenizer = chat_tokenizer_of(kind, template)
    codes = codes_of({"messages": TWO_TURNS}, tokenizer)
    assert codes[-1] == tokenizer.end_of_text
    assert runs(codes[:-1], tokenizer) == [
        "<|im_start|>system\nYou are terse.<|im_end|>\n<|im_start|>user\nSay é.<|im_end|>\n"
        "<|im_start|>assistant\n",
        f"é 日本{read}",
        f"{end}<|im_start|>user\nAgain, <b>loud</b>!<|im_end|>\n<|im_start|>assistant\n",
        f"É!\n\nÉ!{read}",
    ]


def test_special_tokens_of_a_template_are_these_tokens():
    tokenizer = chat_tokenizer_of("json", HEADERS)
    tokens = tokens_of(codes_of({"messages": TWO_TURNS}, tokenizer)).tolist()
    number_of = tokenizer.processor.token_to_id
    assert tokens[0] == number_of("<|begin_of_text|>")
    assert tokens.count(number_of("<|eot_id|>")) == len(TWO_TURNS)
    assert tokens.count(number_of("<|endoftext|>")) == 1
    sentencepiece = chat_tokenizer_of("sentencepiece", INSTRUCT)
    tokens = tokens_of(codes_of({"messages": TWO_TURNS[1:]}, sentencepiece)).tolist()
    assert tokens.count(sentencepiece.end_of_text) == 2  # </s>, as many as there are answers
    assert "</s>" not in sentencepiece.decode(tokens)


@pytest.mark.parametrize("kind", ["bytes", "json", "sentencepiece"])
def test_tokens_lie_where_their_characters_are(kind):
    tokenizer = chat_tokenizer_of(kind)
    text = " <|im_start|>é日本</s>  end"
    (placed,) = encode_with_offsets(tokenizer, [text])
    assert tokenizer.decode(placed.tokens).replace("</s>", "") == text.replace("</s>", "")
    for position, sign in enumerate(text):
        over = placed.tokens[placed.overlap([(position, position + 1)], len(text))]
        if kind == "bytes":
            assert tokenizer.decode(over) == sign
        elif sign in "é日本":
            assert sign in tokenizer.decode(over)
    everything = placed.overlap([(0, len(text))], len(text))
    assert everything.all() and not placed.overlap([], len(text)).any()


def test_a_template_that_writes_end_of_text_does_not_end_the_document():
    """Attention goes on to the second turn; the last one closes the document, once."""
    tokenizer = chat_tokenizer_of("json", INSTRUCT)
    codes = codes_of({"messages": TWO_TURNS[1:]}, tokenizer)
    tokens, end, size = tokens_of(codes), tokenizer.end_of_text, len(codes)
    assert (tokens == end).sum() == 2
    assert (codes == end).nonzero()[0].tolist() == [size - 1]
    segments = [
        Windows(Row(row, [size]), size - 1, "train", end_of_text=end)[0]["segments"].max()
        for row in (codes, tokens)
    ]
    assert segments == [0, 1]  # as codes, and as they would be as tokens


def test_codes_hold_tokens():
    tokens, trained = np.array([0, 1, 2**30 - 1, 5]), np.array([True, False, True, False])
    for end in (0, 1, 5, 9):
        codes = encode_tokens(tokens, trained, end)
        np.testing.assert_array_equal(tokens_of(codes), tokens)
        np.testing.assert_array_equal(is_trained(codes), trained)
        assert end not in codes
    np.testing.assert_array_equal(tokens_of(tokens.astype("<u2")), tokens.astype("<u2"))


# ---------------------------------------------------------------- records


def test_records_in_the_formats_that_people_have():
    expected = json.loads(conversation_of({"messages": TWO_TURNS[1:3]}, "here"))
    said = ["Say é.", "é 日本"]
    senders = [{"from": "human", "value": said[0]}, {"from": "gpt", "value": said[1]}]
    others = [
        {"conversations": senders},
        {"messages": {"role": ["user", "assistant"], "content": said}, "prompt": None},
        {  # as tfds gives them
            "messages": {
                "role": np.array([b"user", b"assistant"], object),
                "content": np.array([each.encode() for each in said], object),
            }
        },
        {"messages": [{**each, "name": None} for each in TWO_TURNS[1:3]], "text": "unused"},
    ]
    for record in others:
        assert json.loads(conversation_of(record, "here")) == expected
    pair = json.loads(conversation_of({"prompt": b"a", "completion": "b", "text": "c"}, "here"))
    assert pair == {"prompt": "a", "completion": "b"}
    tools = conversation_of({"messages": TWO_TURNS, "tools": [{"name": "f"}]}, "here")
    assert json.loads(tools)["tools"] == [{"name": "f"}]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"prompt": "a"}, r"has prompt; data.loss_on=completion needs messages \(a list"),
        ({"prompt": "a", "completion": None}, "has prompt; data.loss_on=completion needs"),
        ({}, "has nothing at all; data.loss_on"),
        ({"prompt": "a", "completion": 3}, "its 'completion' is 3, not text"),
        ({"messages": "hello"}, "its 'messages' is 'hello', not a list of messages"),
        ({"messages": []}, r"its 'messages' is \[\], not a list"),
        ({"messages": ["a"]}, "message 0 of its 'messages' is 'a', not an object with role"),
        ({"messages": [TWO_TURNS[0], {"content": "a"}]}, "message 1 .* has no role, but content"),
        ({"messages": [{"role": "u", "content": [{}]}]}, "message 0 .* content .*, not text"),
    ],
    ids=str,
)
def test_records_that_are_no_conversation(record, message, tmp_path):
    path, good = tmp_path / "a.jsonl", '{"prompt": "x", "completion": "y"}'
    path.write_text(f"{good}\n{json.dumps(record)}\n{good}\n")
    place = rf"data.path: .*a.jsonl, line at byte {len(good) + 1}:? "
    with pytest.raises(InputError, match=place + message):
        source_of(path)


def source_of(path, **keys):
    config = small_config(path)
    config.data.update(loss_on="completion", **keys)
    return load_source(DataKeys(**config.data))


def test_files_that_hold_no_conversations(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "x", "completion": "y"}\n{"prompt": "x", "comp')
    with pytest.raises(InputError, match=r"a.jsonl, line at byte 35 is not JSON: .*; mend or del"):
        source_of(path)
    path.write_text('["x", "y"]\n')
    with pytest.raises(InputError, match=r"byte 0 has no object with messages, .*, but list; mend"):
        source_of(path)
    (tmp_path / "b.txt").write_text("text")
    with pytest.raises(
        InputError, match=r"b.txt holds text; data.loss_on=completion needs records"
    ):
        source_of(tmp_path / "b.txt")
    with pytest.raises(InputError, match=r"and data.source=stdlib is plain text; set data.source"):
        source_of(path, source="stdlib")
    records = _RecordTexts([{"text": "a"}], None, "some/dataset, train")
    with pytest.raises(InputError, match=r"^some/dataset, train, record 0 has text; data.loss_on"):
        records[0]


def test_parquet_and_datasets_hold_conversations_too(tmp_path):
    datasets = pytest.importorskip("datasets", reason="datasets isn't installed")
    records = [{"messages": TWO_TURNS, "id": n} for n in range(4)]
    made = datasets.Dataset.from_list(records)
    made.to_parquet(tmp_path / "a.parquet")
    datasets.DatasetDict({"train": made, "validation": made}).save_to_disk(tmp_path / "saved")
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    expected = source_of(tmp_path / "a.jsonl").train[0]
    assert json.loads(expected) == {"messages": TWO_TURNS}
    found = source_of(tmp_path / "a.parquet")
    assert (len(found.train), len(found.validation)) == (3, 1)  # conversations stay whole
    assert found.train[2] == expected
    assert source_of(tmp_path / "saved", source="huggingface").validation[3] == expected
    made.remove_columns("messages").to_parquet(tmp_path / "b.parquet")
    with pytest.raises(InputError, match=r"b.parquet has id; data.loss_on=completion needs"):
        source_of(tmp_path / "b.parquet")


# ---------------------------------------------------------------- what is skipped


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"prompt": "a", "completion": " "}, "with an empty completion"),
        ({"prompt": "a\0", "completion": "b"}, "with a NUL character"),
        ({"prompt": "a\udcff", "completion": "b"}, "not UTF-8"),
        ({"messages": TWO_TURNS[:2]}, "without a message of the assistant"),
        (
            {"messages": [*TWO_TURNS, {"role": "assistant", "content": "\n"}]},
            "with an empty message of the assistant",
        ),
        ({"messages": TWO_TURNS[2:]}, "refused by the chat template (the user speaks first)"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_conversations_that_are_skipped_and_counted(record, reason):
    assert codes_of(record, chat_tokenizer_of("bytes", MARKED)) == Counter({reason: 1})


def test_messages_need_a_template():
    bare = ByteTokenizer()
    assert len(codes_of({"prompt": "a", "completion": "b"}, bare)) == 3
    with pytest.raises(InputError, match=r"has no chat template .*; set --config.data.chat_t"):
        codes_of({"messages": TWO_TURNS}, bare)


# ---------------------------------------------------------------- from files to batches

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
    assert f"train: 36 conversations, {trained} of " in told
    assert f"({trained} with a loss)" in corpus.amount("train")
    assert "template: none" in told
    examples = Windows(corpus.parts[0].train, 32, "train", end_of_text=END)
    text = "".join(f"{p}{c}\0" for p, c in PAIRS)
    counts = "".join("." * len(p) + "x" * (len(c) + 1) for p, c in PAIRS)
    for k in range(len(examples)):
        window = examples[k]
        at = slice(32 * k, 32 * k + 32)
        assert "".join(map(chr, window["inputs"])) == text[at]
        expected = counts[32 * k + 1 : 32 * k + 33]
        assert "".join(np.where(window["mask"] > 0, "x", ".")) == expected
        starts = np.flatnonzero(np.diff(window["segments"])) + 1
        assert all(window["inputs"][s] == END for s in starts)
    (validation,) = eval_examples(DataKeys(**config.data), corpus)
    counted = sum(int(validation[k]["mask"].sum()) for k in range(len(validation)))
    assert counted == sum(len(c) + 1 for _, c in PAIRS[36:])


def test_first_fit(config, tmp_path):
    corpus = corpus_of(config.data, tmp_path, new=True)
    rows = FirstFitRows(corpus.parts[0].train, 64, "train", seed=0, end_of_text=END)
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
        Windows(each.parts[0].train, 32, "train", seed=1, end_of_text=END)
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
    with pytest.raises(InputError, match=r"chat_template=a.jinja: prepare_data has already"):
        corpus_of(config.data, tmp_path / "refused", new=True)


def test_shards_of_whole_texts_hold_no_masks(config, tmp_path):
    (tmp_path / "text.txt").write_text("some words\n" * 50)
    config.data.update(loss_on="all", path=str(tmp_path / "text.txt"))
    corpus_of(config.data, tmp_path / "run", new=True)
    made = tmp_path / "run" / "data" / "0"
    assert "masks" not in json.loads((made / "manifest.json").read_text())
    config.data.update(source="tokens", path=str(made))
    folder = tmp_path / "tuned" / "tokenizer"
    adopt_tokenizer(chat_tokenizer_of("bytes"), folder, DataKeys(**config.data))
    tuned = corpus_of(config.data, tmp_path / "tuned", new=True)
    assert tuned.tokenizer.chat.template == CHATML  # that of the run in init_from
    config.data.loss_on = "completion"
    with pytest.raises(InputError, match=r"on=completion: the shards in .* with data.loss_on=all"):
        corpus_of(config.data, tmp_path / "refused", new=True)
    manifest = json.loads((made / "manifest.json").read_text())
    (made / "manifest.json").write_text(json.dumps({**manifest, "masks": True}))
    with pytest.raises(InputError, match=r"of train, it lacks 'trained_tokens'"):
        shards.ShardedDocuments(made, "train")


def test_tokenised_in_the_loop(config, tmp_path, monkeypatch):
    monkeypatch.setattr(streams, "BLOCK_TOKENS", 5 * 4 * 32)
    config.data.tokenize = "in_loop"
    corpus = corpus_of(config.data, tmp_path, new=True)
    rows = train_examples(DataKeys(**config.data), corpus, 4, 0)
    found = rows.batches(np.arange(4), 0, None)
    batches = [next(found) for _ in range(30)]
    check_masks([batch for batch, _ in batches])
    again = rows.batches(np.arange(4), 11, batches[10][1].tolist())
    for expected, _ in batches[11:]:
        jax.tree.map(np.testing.assert_array_equal, next(again)[0], expected)


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


def test_a_trained_tokenizer_reads_what_is_said(config, tmp_path):
    config.data.update(tokenizer="sentencepiece", tokenizer_vocab_size=320)
    corpus = corpus_of(config.data, tmp_path, new=True)
    pieces = {corpus.tokenizer.processor.id_to_piece(i) for i in range(320)}
    assert any("st" in piece for piece in pieces), sorted(pieces)
    assert not any("prompt" in piece or "{" in piece for piece in pieces)


# ---------------------------------------------------------------- training


def batch_of(mask):
    random = np.random.default_rng(0)
    inputs, targets = random.integers(0, 50, (2, 2, 10)).astype(np.int32)
    return {"inputs": inputs, "targets": targets, "mask": np.asarray(mask, np.float32)}


@pytest.mark.slow
def test_the_gradient_does_not_depend_on_targets_that_do_not_count():
    model = small_model(weights="per_layer", num_steps=1)
    params, key = random_params(model), jax.random.key(0)
    keys = train_keys(loss_chunk=32, microbatches=2, z_loss=0.1)
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
    with pytest.raises(InputError, match=r"no token of the batches .* raise train.eval_batches"):
        evaluate_loss(lambda params, batch: nothing, {}, iter([{}]))


def test_plain_texts_are_what_they_were():
    found = list(tokenise_documents(["a b"], TextEncoder(ByteTokenizer()), Counter()))
    assert found[0].dtype == "<u2" and found[0].tolist() == [97, 32, 98, 0]
    assert Config.of(small_config("x")).data.loss_on == "all"
