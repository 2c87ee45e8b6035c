"""Conversations become one text by the tokenizer's template, and it is known who wrote what."""

import json
import sys
from datetime import datetime

import pytest
from chats import CHATML, FILE_TOKENS, HEADERS, INSTRUCT, MARKED, TWO_TURNS, tokenizer_json
from helpers import small_config

from t5x_diffeq.data.chat_template import (
    ChatFormat,
    ChatTemplate,
    TemplateError,
    read_chat_format,
    read_template,
)
from t5x_diffeq.data.recipe import adopt_tokenizer, tokenizer_in
from t5x_diffeq.data.tokenizer import ByteTokenizer, load_tokenizer, make_tokenizer, with_template
from t5x_diffeq.runtime.config import Config
from t5x_diffeq.runtime.errors import InputError

TURN = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


def template_of(text):
    return ChatTemplate(ChatFormat(text, FILE_TOKENS, "here"), {})


def written_by_assistant(template, messages):
    text, spans = template.render_spans(messages, "assistant")
    return [text[start:stop] for start, stop in spans]


def test_templates_write_what_they_say():
    assert template_of(CHATML).render(TURN) == (
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n"
    )
    assert template_of(HEADERS).render(TURN[:1], prompting=True) == (
        "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\na<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )
    assert template_of(INSTRUCT).render(TURN) == "[INST] a [/INST] b<|endoftext|>"
    unlike_html = template_of(INSTRUCT).render([{"role": "tool", "content": "<é>"}])
    assert json.loads(unlike_html) == {"role": "tool", "content": "<é>"} and "<é>" in unlike_html


def test_the_environment_is_that_of_transformers():
    blocks = template_of("{% if true %}\n    {% set x = 1 %}\nx{{ x }}\n{% endif %}\ny")
    assert blocks.render([]) == "x1\ny"  # trim_blocks, lstrip_blocks
    loop = template_of(
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}m{% endfor %}"
    )
    assert loop.render(TURN) == "m"
    day = ChatFormat("{{ strftime_now('%d %b %Y') }}{{ unset_token }}")
    assert ChatTemplate(day, {}).render([]) == "26 Jul 2024"  # training data is the same on any day
    assert ChatTemplate(day, {}, datetime(2031, 1, 2)).render([]) == "02 Jan 2031"
    tools = template_of("{{ tools | tojson }}").render([], tools=[{"name": "é"}])
    assert tools == '[{"name": "é"}]'
    for unsafe in ("{{ messages.__class__.__mro__ }}", "{{ messages.append(1) }}"):
        with pytest.raises(TemplateError):
            template_of(unsafe).render(TURN)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (CHATML, ["é 日本<|im_end|>\n", "É!\n\nÉ!<|im_end|>\n"]),
        (MARKED, ["é 日本<|im_end|>", "É!\n\nÉ!<|im_end|>"]),
        (HEADERS, ["é 日本<|eot_id|>", "É!\n\nÉ!<|eot_id|>"]),
    ],
    ids=["chatml", "marked", "headers"],
)
def test_what_the_assistant_wrote(text, expected):
    assert written_by_assistant(template_of(text), TWO_TURNS) == expected


def test_the_plain_template_is_built_in(small):
    small.data.chat_template = "plain"
    tokenizer = with_template(ByteTokenizer(), Config.of(small).data)
    template = ChatTemplate(tokenizer.chat, tokenizer.special_tokens)
    text, spans = template.render_spans(TWO_TURNS, "assistant")
    asked, answered = (TWO_TURNS[n]["content"] for n in (-2, -1))
    assert text.endswith(f"User:\n{asked}\n\nAssistant:\n{answered}\n\n")
    assert text[slice(*spans[-1])].startswith(answered)
    assert template.render(TWO_TURNS[:-1], prompting=True).endswith("\n\nAssistant:\n")


def test_without_generation_prompt_the_answer_begins_after_the_question():
    assert written_by_assistant(template_of(INSTRUCT), TURN) == [" b<|endoftext|>"]


def test_templates_that_hide_who_wrote_what_are_refused():
    last_role = "{{ m.role if loop.last else '' }}{{ m.content }}|"
    short_history = "{{ m.content if loop.last or m.role != 'assistant' else m.content[:1] }}|"
    prompts = ["", "", "{{ 'thinks' if add_generation_prompt }}"]
    for each, prompt in zip((last_role, short_history, "{{ m.content }}"), prompts, strict=True):
        template = template_of("{% for m in messages %}" + each + "{% endfor %}" + prompt)
        with pytest.raises(InputError, match=r"of here writes message 2 of .* endgeneration %}, a"):
            template.render_spans(TWO_TURNS, "assistant")
    shouted = (
        "{% filter upper %}{% generation %}"
        + "{{ messages[0].content }}"
        + ("{% endgeneration %}{% endfilter %}")
    )
    assert written_by_assistant(template_of(shouted), TURN) == ["A"]
    trimmed = shouted.replace("upper", "trim")
    spaced = [{"role": "user", "content": " a "}]
    with pytest.raises(InputError, match=r"changes what its {% generation %} blocks hold"):
        template_of(trimmed).render_spans(spaced, "assistant")


def test_templates_that_refuse_a_conversation():
    with pytest.raises(TemplateError, match=r"^the user speaks first$"):
        template_of(MARKED).render(TURN[1:])
    with pytest.raises(TemplateError, match="can only concatenate str"):
        template_of(CHATML).render([{"role": "user", "content": 3}])


def test_what_ends_an_answer():
    assert template_of(CHATML).end_of_answer() == "<|im_end|>"
    assert template_of(INSTRUCT).end_of_answer() == "<|endoftext|>"
    assert template_of("{{ messages[0].content }}").end_of_answer() == ""


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config.json": {"chat_template": CHATML, **FILE_TOKENS}},
        {"tokenizer_config.json": FILE_TOKENS, "chat_template.jinja": CHATML},
        {
            "tokenizer_config.json": {
                "chat_template": [
                    {"name": "tool_use", "template": INSTRUCT},
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
    found.save(tmp_path / "saved")
    again = read_chat_format(tmp_path / "saved")
    assert (again.template, again.tokens) == (found.template, found.tokens)
    assert again.fingerprint == found.fingerprint != ChatFormat(CHATML).fingerprint


def test_files_that_can_not_be_used(tmp_path, monkeypatch):
    assert read_chat_format(tmp_path).template is None
    ChatFormat().save(tmp_path)
    assert not list(tmp_path.iterdir())
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": [{"name": "rag", "template": "x"}]}))
    with pytest.raises(InputError, match=r"the chat templates rag, and none is the default; write"):
        read_chat_format(tmp_path)
    config.write_text("{")
    with pytest.raises(InputError, match=r"tokenizer_config.json is damaged"):
        read_chat_format(tmp_path)
    with pytest.raises(InputError, match=r"the chat template .*none.jinja can't be read as text"):
        read_template(tmp_path / "none.jinja", {})
    with pytest.raises(InputError, match=r"template of here is invalid: .*; fix it, or name"):
        template_of("{% if %}")
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(InputError, match=r"the package jinja2; pip install 't5x_diffeq\[data\]'"):
        template_of(CHATML)


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
