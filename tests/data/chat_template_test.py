"""The chat template that a tokenizer's files have, and what transformers writes with it."""

import json
from datetime import datetime
from functools import partial
from itertools import product
from random import Random

import pytest
from chats import (
    CHATML,
    FILE_TOKENS,
    HEADERS,
    MARKED,
    TEMPLATES,
    TWO_TURNS,
    chat_tokenizer_of,
    tokenizer_json,
)
from helpers import small_config
from jinja2.sandbox import ImmutableSandboxedEnvironment

from t5x_diffeq.config.config import Config
from t5x_diffeq.data import chat as chat_module
from t5x_diffeq.data.chat import Chat, TemplateError, _bounded
from t5x_diffeq.data.chat_template import ChatFormat, read_chat_format, read_template
from t5x_diffeq.data.fast_tokenizer import parse_sentencepiece
from t5x_diffeq.data.file_tokenizers import SentencePieceTokenizer
from t5x_diffeq.data.recipe import adopt_tokenizer, make_tokenizer, tokenizer_in, with_template
from t5x_diffeq.data.tokenizer import ByteTokenizer
from t5x_diffeq.data.tokenizer_folder import load_tokenizer
from t5x_diffeq.hf.tokenizer_files import write_tokenizer
from t5x_diffeq.system.errors import InputError

TURN = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


def chat_of(template, kind="bytes"):
    return Chat(chat_tokenizer_of(kind, template))


def test_an_exported_tokenizer_writes_conversations_as_ours(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    from transformers import AutoTokenizer

    for kind, (name, template) in product(("bytes", "json", "prefixed"), TEMPLATES.items()):
        if (kind, name) == ("bytes", "instruct"):
            continue  # bytes have no eos_token to write
        tokenizer = chat_tokenizer_of(kind, template)
        if (kind, name) == ("prefixed", "marked"):
            tokenizer.open_with(tokenizer.processor.bos_id())
        messages = TWO_TURNS if name != "instruct" else TWO_TURNS[1:]
        folder = tmp_path / f"{kind}_{name}"
        folder.mkdir()
        write_tokenizer(tokenizer, folder, max_length=100)
        theirs = AutoTokenizer.from_pretrained(folder)
        plain = tokenizer.read("a plain text", "the text")
        assert theirs("a plain text").input_ids == plain, folder
        tokens, trained = Chat(tokenizer).encode(messages)
        found = theirs.apply_chat_template(messages, return_assistant_tokens_mask=True)
        assert list(found["input_ids"]) == tokens.tolist(), folder
        assert list(found["assistant_masks"]) == trained.astype(int).tolist(), folder
        asked = theirs.apply_chat_template(TURN[:1], add_generation_prompt=True)
        assert list(asked["input_ids"]) == Chat(tokenizer).ask("a"), folder


def test_what_stands_before_a_question():
    """Without an opener nothing, except what stood there when the run was tuned."""
    tokenizer = chat_tokenizer_of("json", CHATML)
    end = tokenizer.end_of_text
    written = Chat(tokenizer).ask("a")
    assert tokenizer.read("a", "--prompt", 99, Chat(tokenizer).ask) == written
    assert written[0] == tokenizer.token_id("<|im_start|>")
    tuned = Chat(tokenizer, trained=True).ask
    assert tokenizer.read("a", "--prompt", 99, tuned) == [end, *written]


def test_a_template_asks_for_the_day():
    """And training data is the same on any day."""
    day = chat_tokenizer_of("bytes", "{{ strftime_now('%d %b %Y') }}{{ unset_token }}")
    assert ByteTokenizer().decode(Chat(day).encode(TURN)[0]) == "26 Jul 2024"
    assert ByteTokenizer().decode(Chat(day, datetime(2031, 1, 2)).ask("a")) == "02 Jan 2031"


def test_the_plain_template_is_built_in(small):
    small.data.chat_template = "plain"
    tokenizer = with_template(ByteTokenizer(), Config.of(small).data)
    tokens, trained = Chat(tokenizer).encode(TWO_TURNS)
    asked, answered = (TWO_TURNS[n]["content"] for n in (-2, -1))
    text = tokenizer.decode(tokens)
    assert text.endswith(f"User:\n{asked}\n\nAssistant:\n{answered}\n\n")
    assert tokenizer.decode(tokens[trained]) == f"{TWO_TURNS[2]['content']}\n\n{answered}\n\n"
    assert tokenizer.decode(Chat(tokenizer).ask("a")) == "User:\na\n\nAssistant:\n"


def test_templates_that_hide_who_wrote_what_are_refused():
    in_macro = (
        "{% macro say(m) %}<{{ m.role }}>{% generation %}{{ m.content }}{% endgeneration %}"
        "{% endmacro %}{% for m in messages %}{{ say(m) }}{% endfor %}"
    )
    everything = (
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    )
    for template in (CHATML, in_macro, everything):
        with pytest.raises(
            InputError, match=r"the tokenizer doesn't mark .*endgeneration %} after"
        ):
            chat_of(template).check_marks()
    for template in TEMPLATES.values():
        chat_of(template, "json").check_marks()
    chat_of("{{ raise_exception('a system message is needed') }}").check_marks()


def test_what_can_not_be_written():
    with pytest.raises(TemplateError, match=r"^the user speaks first$"):
        chat_of(MARKED).encode(TURN[1:])
    for unsafe in ("{{ messages.__class__.__mro__ }}", "{{ messages.append(1) }}"):
        with pytest.raises(TemplateError):
            chat_of(unsafe).ask("a")
    with pytest.raises(InputError, match=r"template in the tokenizer is invalid: .*; correct it, "):
        chat_of("{% if %}").ask("a")
    model = chat_tokenizer_of("sentencepiece").model
    normalising = SentencePieceTokenizer(model)
    proto = parse_sentencepiece(normalising.model)
    proto.normalizer_spec.precompiled_charsmap = b"some"
    normalising.model = proto.SerializeToString()
    with pytest.raises(InputError, match=r"is not a plain byte-pair .*; name its tokenizer.json"):
        Chat(normalising)


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    ],
    ids=["loop", "recursion"],
)
def test_a_template_that_does_not_end(template, monkeypatch):
    monkeypatch.setattr(chat_module, "_MOST_PASSES", 100)
    with pytest.raises(InputError, match=r"in the tokenizer doesn't end: .* 100 times; correct it"):
        chat_of(template).ask("a")


BODIES = ("a", "{{ x }}", "{{- x -}}", "{# c #}", "{% raw %}{% for %}{% endraw %}", "{{ '%}' }}")


def test_counting_loops_changes_no_text():
    """Nor the rules by which a template's spaces and newlines are left out."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    random = Random(0)
    space = partial(random.choice, ("", "\n", " ", "  \n", "\n  ", "\t", "\n\n", "\r\n"))

    def tag(text):
        return f"{{%{random.choice(('', '-', '+'))} {text} {random.choice(('', '-', '+'))}%}}"

    written = set()
    for _ in range(200):
        parts = ("for x in ['%}', 2]", "if x == 2", "for x in y", "endfor", "endif", "endfor")
        parts = [*parts, "macro f(x)", "endmacro"]
        pieces = [f"{space()}{tag(x)}{space()}{random.choice(BODIES)}{space()}" for x in parts]
        template = f"{''.join(pieces)}{{{{ f(3) }}}}{space()}"
        text = environment.from_string(template).render(y=[7, 8])
        assert environment.from_string(_bounded(template)).render(y=[7, 8]) == text, template
        written.add(text)
    assert len(written) > 100


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config.json": {"chat_template": CHATML, **FILE_TOKENS}},
        {"tokenizer_config.json": FILE_TOKENS, "chat_template.jinja": CHATML},
        {
            "tokenizer_config.json": {
                "chat_template": [
                    {"name": "tool_use", "template": MARKED},
                    {"name": "default", "template": CHATML},
                ],
                "eos_token": {"content": "<|endoftext|>", "lstrip": False},
                "pad_token": None,
                "model_max_length": 10,
            },
            "special_tokens_map.json": {"bos_token": "<|begin_of_text|>", "eos_token": "other"},
        },
    ],
    ids=["config", "jinja", "several"],
)
def test_files_of_a_hugging_face_folder(files, tmp_path):
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (tmp_path / name).write_text(text)
    found = read_chat_format(tmp_path)
    assert (found.template, found.tokens) == (CHATML, FILE_TOKENS)
    assert found.origin.startswith(str(tmp_path))
    (tmp_path / "saved").mkdir()
    for name, content in found.files.items():
        (tmp_path / "saved" / name).write_bytes(content)
    again = read_chat_format(tmp_path / "saved")
    assert (again.template, again.tokens) == (found.template, found.tokens)
    assert again.fingerprint == found.fingerprint != ChatFormat(CHATML).fingerprint


def test_files_that_can_not_be_used(tmp_path, monkeypatch):
    assert read_chat_format(tmp_path).template is None
    assert ChatFormat().files == {}
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": [{"name": "rag", "template": "x"}]}))
    with pytest.raises(
        InputError, match=r"the chat templates rag, and no default; copy one to a file"
    ):
        read_chat_format(tmp_path)
    nameless = [{"template": CHATML}]
    for template in (7, {"default": CHATML}, nameless, ["x"], [{"name": "default", "template": 7}]):
        config.write_text(json.dumps({"chat_template": template}))
        with pytest.raises(InputError, match=r"chat_template is .*_config.json; it must be"):
            read_chat_format(tmp_path)
    config.write_text("{")
    with pytest.raises(InputError, match=r"tokenizer_config.json can't be read"):
        read_chat_format(tmp_path)
    with pytest.raises(InputError, match=r"the chat template .*none.jinja can't be read as text"):
        read_template(tmp_path / "none.jinja", {})


def test_a_template_comes_with_the_tokenizers_file_or_by_name(small, tmp_path):
    """And a folder's tokenizer that was made with another template is refused."""
    (tmp_path / "tokenizer.json").write_bytes(tokenizer_json())
    config = {"chat_template": CHATML, **FILE_TOKENS}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "other.jinja").write_text(HEADERS)
    small.data.tokenizer = str(tmp_path / "tokenizer.json")
    made = make_tokenizer(Config.of(small).data, [])
    assert (made.chat.template, made.chat.tokens) == (CHATML, FILE_TOKENS)
    tokenizer_in(tmp_path / "made", Config.of(small).data, [])
    kept = tokenizer_in(tmp_path / "made", Config.of(small).data, [])
    assert kept.chat.fingerprint == made.chat.fingerprint
    small.data.chat_template = str(tmp_path / "other.jinja")
    other = make_tokenizer(Config.of(small).data, [])
    assert (other.chat.template, other.chat.tokens) == (HEADERS, FILE_TOKENS)
    assert other.fingerprint == made.fingerprint
    with pytest.raises(InputError, match=r"was made with data.chat_template None, not '.*jinja'"):
        tokenizer_in(tmp_path / "made", Config.of(small).data, [])
    adopt_tokenizer(made, tmp_path / "made", Config.of(small).data)  # as fine-tuning does
    assert load_tokenizer(tmp_path / "made").chat.template == HEADERS
    adopt_tokenizer(ByteTokenizer(), tmp_path / "bytes", Config.of(small_config("x")).data)
    assert load_tokenizer(tmp_path / "bytes").chat.template is None
