"""Conversations: how records become tokens, and which of these are trained on."""

import json
from collections import Counter

import numpy as np
import pytest
from chats import HEADERS, INSTRUCT, MARKED, TWO_TURNS, chat_tokenizer_of
from helpers import small_config
from row import Row

from t5x_diffeq.config.config import DataKeys
from t5x_diffeq.data.conversations import conversation_of
from t5x_diffeq.data.encoding import ConversationEncoder, encode_tokens, is_trained, tokens_of
from t5x_diffeq.data.named_source import load_source
from t5x_diffeq.data.packing import Windows
from t5x_diffeq.data.preparation import tokenise_documents
from t5x_diffeq.data.rows import Skipped
from t5x_diffeq.data.sources import _RecordTexts
from t5x_diffeq.data.tokenizer import Border, ByteTokenizer
from t5x_diffeq.system.errors import InputError


def codes_of(record, tokenizer):
    """The codes of one record as they are stored."""
    document, skipped = conversation_of(record, "here"), Skipped()
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


@pytest.mark.parametrize("kind", ["bytes", "json", "sentencepiece"])
def test_of_several_turns_every_answer_is_trained_on(kind):
    tokenizer = chat_tokenizer_of(kind)
    codes = codes_of({"messages": TWO_TURNS}, tokenizer)
    assert codes[-1] == tokenizer.end_of_text
    assert runs(codes[:-1], tokenizer) == [
        "<|im_start|>system\nYou are terse.<|im_end|>\n<|im_start|>user\nSay é.<|im_end|>\n"
        "<|im_start|>assistant\n",
        "é 日本<|im_end|>",
        "\n<|im_start|>user\nAgain, <b>loud</b>!<|im_end|>\n<|im_start|>assistant\n",
        "É!\n\nÉ!<|im_end|>",
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


def test_a_template_that_writes_end_of_text_does_not_end_the_document():
    """Attention goes on to the second turn; the last one closes the document, once."""
    tokenizer = chat_tokenizer_of("json", INSTRUCT)
    codes = codes_of({"messages": TWO_TURNS[1:]}, tokenizer)
    tokens, end, size = tokens_of(codes), tokenizer.end_of_text, len(codes)
    assert (tokens == end).sum() == 2
    assert (codes == end).nonzero()[0].tolist() == [size - 1]
    segments = [
        Windows(Row(row, [size]), size, "train", Border(end, end))[0]["segments"].max()
        for row in (codes, tokens)
    ]
    assert segments == [1, 2]  # as codes, and as they would be as tokens


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
        ({}, "has nothing at all; data.loss_on"),
        ({"prompt": "a", "completion": 3}, "its 'completion' is 3, not text"),
        ({"messages": "hello"}, "its 'messages' is 'hello', not a list of messages"),
        ({"messages": {"role": "user", "content": "a"}}, "its 'messages' is {'role': .*, not a"),
        ({"messages": {"role": ["user"], "content": []}}, "its .*, not a list of messages"),
        ({"messages": {}}, "its 'messages' is {}, not a list of messages"),
        ({"messages": ["a"]}, "message 0 of its 'messages' is 'a', not an object with role"),
        (
            {"messages": [TWO_TURNS[0], {"content": "a"}]},
            "message 1 .* has no role, but only content",
        ),
        ({"messages": [{"role": "u", "content": [{}]}]}, "message 0 .* content .*; it must be one"),
        (
            {"messages": [{"role": "u", "text": "a"}]},
            "message 0 .* has no content, but only role, text",
        ),
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
    wrong = r"a.jsonl, line at byte 35 is not JSON: .*; write one object per line, or delete it"
    with pytest.raises(InputError, match=wrong):
        source_of(path)
    path.write_text('["x", "y"]\n')
    with pytest.raises(InputError, match=r"byte 0 is not a JSON object but list"):
        source_of(path)
    (tmp_path / "b.txt").write_text("text")
    with pytest.raises(
        InputError, match=r"b.txt holds text; data.loss_on=completion needs records"
    ):
        source_of(tmp_path / "b.txt")
    with pytest.raises(InputError, match=r"and data.source=stdlib is plain text; set data.source"):
        source_of(path, source="stdlib")
    records = _RecordTexts([{"text": "a"}], None, "some/dataset, train")
    assert records[0].fault.startswith("some/dataset, train, record 0 has text; data.loss_on")


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
        (
            {"messages": [*TWO_TURNS[:2], {"role": "AI", "content": "a"}]},
            "without a message of the role assistant, but of AI, system, user",
        ),
        (
            {"messages": [*TWO_TURNS, {"role": "assistant", "content": "\n"}]},
            "with an empty message of the assistant",
        ),
        ({"messages": TWO_TURNS[2:]}, "rejected by the chat template (the user speaks first)"),
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
