"""Chat templates: how a tokenizer writes a conversation as one text.

A template is a Jinja text in the files of a Hugging Face tokenizer. It is rendered with the same
environment as in transformers (`apply_chat_template`), so that the text is the same.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from t5x_diffeq.runtime.errors import InputError
from t5x_diffeq.runtime.extras import need_package
from t5x_diffeq.runtime.files import AnyPath, digest, parse_json, write_whole

_TEMPLATE_FILE = "chat_template.jinja"
_CONFIG_FILE, _MAP_FILE = "tokenizer_config.json", "special_tokens_map.json"
_START, _STOP = "\0(", "\0)"  # around what {% generation %} holds; no conversation contains NUL
_DAY_OF_DATA = datetime(2024, 7, 26)  # what `strftime_now` returns: data is the same on any day
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
PLAIN = "plain"  # the value of `data.chat_template` that means this template
_PLAIN_TEMPLATE = """\
{%- for message in messages %}
    {{- message['role'] | capitalize + ':\\n' + message['content'] + '\\n\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- 'Assistant:\\n' }}
{%- endif %}
"""
Span = tuple[int, int]  # the first character, and the one after the last


class TemplateError(Exception):
    """A template can't render a conversation; the message says why."""


@dataclass(frozen=True)
class ChatFormat:
    """What the files of a tokenizer say about conversations.

    Attributes:
      template: its chat template; None if it has none.
      tokens: special tokens by the names that templates have for them, such as `eos_token`.
      origin: where the template was found.
    """

    template: str | None = None
    tokens: Mapping[str, str] = field(default_factory=dict)
    origin: str = "the tokenizer"

    @property
    def fingerprint(self) -> str:
        """A hash of everything that determines how a conversation is written."""
        parts = (self.template or "", json.dumps(sorted(self.tokens.items())))
        return digest(map(str.encode, parts))

    def save(self, folder: AnyPath) -> None:
        """Writes the files of a Hugging Face folder that hold it."""
        if self.tokens:
            write_whole(folder / _CONFIG_FILE, json.dumps(dict(self.tokens), indent=2).encode())
        if self.template is not None:
            write_whole(folder / _TEMPLATE_FILE, self.template.encode())


def read_chat_format(folder: AnyPath) -> ChatFormat:
    """What the files in a tokenizer's folder say about conversations.

    Raises:
      InputError: if one can't be read, or there are several templates and none is the default.
    """
    config = _read_json(folder / _CONFIG_FILE)
    settings = {**_read_json(folder / _MAP_FILE), **config}
    tokens = {
        key: text
        for key, value in settings.items()
        if key.endswith("_token") and (text := _content(value)) is not None
    }
    template = config.get("chat_template")
    if (folder / _TEMPLATE_FILE).exists():
        chat = read_template(folder / _TEMPLATE_FILE, tokens)
        if isinstance(template, str) and template.strip() != str(chat.template).strip():
            raise InputError(
                f"{folder} has one chat template in {_TEMPLATE_FILE} and another one in "
                f"{_CONFIG_FILE}; delete one of them"
            )
        return chat
    if isinstance(template, list):
        named = {each["name"]: each["template"] for each in template}
        if "default" not in named:
            raise InputError(
                f"{folder / _CONFIG_FILE} has the chat templates {', '.join(named)}, and none is "
                "the default; write one to a file and set --config.data.chat_template=FILE"
            )
        template = named["default"]
    return ChatFormat(template, tokens, str(folder / _CONFIG_FILE))


def plain_format(tokens: Mapping[str, str]) -> ChatFormat:
    """The template that needs no special tokens: `User:`, the message, a blank line, and so on."""
    return ChatFormat(_PLAIN_TEMPLATE, tokens, f"data.chat_template={PLAIN}")


def read_template(path: AnyPath, tokens: Mapping[str, str]) -> ChatFormat:
    """The template in a file.

    Raises:
      InputError: if it can't be read.
    """
    try:
        return ChatFormat(path.read_text("utf-8"), tokens, str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"the chat template {path} can't be read as text: {error}; set "
            "--config.data.chat_template=FILE.jinja"
        ) from error


def _read_json(path: AnyPath) -> dict:
    if not path.exists():
        return {}
    try:
        settings = parse_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise InputError(f"{path} is damaged: {error}; restore it") from error
    return settings if isinstance(settings, dict) else {}


def _content(token: object) -> str | None:
    """The text of a special token, which can be in an object with its properties."""
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


class ChatTemplate:
    """A compiled template.

    Args:
      chat: the tokenizer's chat format, with a template.
      tokens: special tokens that the tokenizer has where its files name none.
      now: the time that the template can ask for; training data has the same one on any day.

    Raises:
      InputError: if the template is invalid, or jinja2 isn't installed.
    """

    def __init__(self, chat: ChatFormat, tokens: Mapping[str, str], now: datetime = _DAY_OF_DATA):
        assert chat.template is not None  # whoever calls this has checked it
        self.tokens, self.origin = {**tokens, **chat.tokens}, chat.origin
        self.has_generation = _GENERATION.search(chat.template) is not None
        self._plain = _compile(chat, now, lambda text: text)
        self._marked = _compile(chat, now, lambda text: _START + text + _STOP)

    def render(
        self, messages: list[dict], prompting: bool = False, tools: Any = None, marked: bool = False
    ) -> str:
        """The text of a conversation.

        Args:
          messages: its messages.
          prompting: whether to add what precedes the assistant's next message.
          tools: the tools that the assistant can call, in transformers' form.
          marked: whether marks stand around what `{% generation %}` blocks hold.

        Raises:
          TemplateError: if the template rejects the conversation.
        """
        try:
            return (self._marked if marked else self._plain).render(
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=prompting,
                **self.tokens,
            )
        except Exception as error:  # a template can raise anything
            raise TemplateError(" ".join(str(error).split()) or type(error).__name__) from error

    def end_of_answer(self) -> str:
        """What the template writes after an answer, such as `<|im_end|>`; empty if nothing."""
        said = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "answer"}]
        try:
            _, found, end = self.render(said).rpartition("answer")
        except TemplateError:
            return ""
        return end.strip() if found else ""

    def render_spans(
        self, messages: list[dict], answerer: str, tools: Any = None
    ) -> tuple[str, list[Span]]:
        """The text of a conversation, and the spans of it that the answerer writes.

        They are what the template's `{% generation %}` blocks hold. If it has none, they are what
        each of the answerer's messages adds to the earlier ones with the generation prompt.

        Raises:
          TemplateError: if the template rejects the conversation.
          InputError: if the text of the first messages isn't a prefix of the text of all.
        """
        text = self.render(messages, tools=tools)
        if self.has_generation:
            return text, self._generated(text, messages, tools)
        spans = []
        for number in (n for n, each in enumerate(messages) if each["role"] == answerer):
            before = self.render(messages[:number], prompting=True, tools=tools)
            until = self.render(messages[: number + 1], tools=tools)
            if not (until.startswith(before) and text.startswith(until)):
                raise InputError(
                    f"the chat template of {self.origin} writes message {number} of the "
                    f"conversation that begins {text[:60]!r} differently when others follow or "
                    "precede it, so the assistant's text can't be located; mark it in the "
                    "template with {% generation %} and {% endgeneration %}, and set "
                    "--config.data.chat_template=FILE"
                )
            spans.append((len(before), len(until)))
        return text, spans

    def _generated(self, text: str, messages: list[dict], tools: Any) -> list[Span]:
        """The spans of the text that its `{% generation %}` blocks wrote."""
        parts = re.split(r"\0([()])", self.render(messages, tools=tools, marked=True))
        if "".join(parts[::2]) != text:
            raise InputError(
                f"the chat template of {self.origin} changes what its {{% generation %}} blocks "
                "hold after them; place them around what is written as it is"
            )
        spans, position, starts = [], len(parts[0]), []
        for mark, part in zip(parts[1::2], parts[2::2], strict=True):
            if mark == "(":
                starts.append(position)
            else:
                spans.append((starts.pop(), position))
            position += len(part)
        return spans


def _compile(chat: ChatFormat, now: datetime, mark: Callable[[str], str]) -> Any:
    """The template in transformers' environment; `mark` is applied to `{% generation %}` blocks."""
    need_package("jinja2", "a chat template")
    import jinja2.ext
    import jinja2.sandbox

    class Generation(jinja2.ext.Extension):
        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            call = self.call_method("_mark", lineno=line)
            return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

        def _mark(self, caller: Callable[[], str]) -> str:
            return mark(caller())

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(raise_exception=_refuse, strftime_now=now.strftime)
    try:
        return environment.from_string(str(chat.template))
    except jinja2.TemplateError as error:
        raise InputError(
            f"the chat template of {chat.origin} is invalid: {error}; fix it, or name another "
            "with --config.data.chat_template=FILE"
        ) from error


def _refuse(message: str) -> None:
    """`raise_exception` of templates."""
    raise TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own `tojson` would write characters of HTML as escapes."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
