"""Reads what a tokenizer's files say about conversations: a Jinja template and special tokens."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from t5x_diffeq.system.errors import InputError
from t5x_diffeq.system.files import AnyPath, describe_error, digest, read_json_object
from t5x_diffeq.system.foreign_files import read_inside

_TEMPLATE_FILE = "chat_template.jinja"
_CONFIG_FILE, _MAP_FILE = "tokenizer_config.json", "special_tokens_map.json"
# The template of data.chat_template=plain, which needs no special tokens.
PLAIN_TEMPLATE = """\
{%- for message in messages %}
    {{- message['role'] | capitalize + ':\\n' }}
    {%- if message['role'] == 'assistant' %}
        {%- generation %}{{- message['content'] + '\\n\\n' }}{%- endgeneration %}
    {%- else %}
        {{- message['content'] + '\\n\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- 'Assistant:\\n' }}
{%- endif %}
"""


@dataclass(frozen=True)
class ChatFormat:
    """What the files of a tokenizer say about conversations.

    They give a chat template (or None), found in `origin`, and special `tokens` by the names that
    templates have for them, such as `eos_token`.
    """

    template: str | None = None
    tokens: Mapping[str, str] = field(default_factory=dict)
    origin: str = "the tokenizer"

    @property
    def fingerprint(self) -> str:
        """A hash of everything that determines how a conversation is written."""
        parts = (self.template or "", json.dumps(sorted(self.tokens.items())))
        return digest(map(str.encode, parts))

    @property
    def files(self) -> dict[str, bytes]:
        """The files of a Hugging Face folder that hold template and tokens, by their names."""
        tokens = json.dumps(dict(self.tokens), indent=2) if self.tokens else None
        files = {_CONFIG_FILE: tokens, _TEMPLATE_FILE: self.template}
        return {name: text.encode() for name, text in files.items() if text is not None}


def read_chat_format(folder: AnyPath) -> ChatFormat:
    """What a tokenizer's folder says about conversations; an InputError if it can't be used."""
    config = read_settings(folder / _CONFIG_FILE)
    settings = {**read_settings(folder / _MAP_FILE), **config}
    tokens = {
        key: text
        for key in settings
        if key.endswith("_token") and (text := special_token(settings[key])) is not None
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
    return ChatFormat(_default_of(template, folder), tokens, str(folder / _CONFIG_FILE))


def _default_of(template: object, folder: AnyPath) -> str | None:
    """The template that `tokenizer_config.json` gives, alone or as the default of several."""
    path = folder / _CONFIG_FILE
    way_out = "copy one to a file and set --config.data.chat_template=FILE.jinja"
    several = template if isinstance(template, list) else []
    if several and all(isinstance(each, dict) and "name" in each for each in several):
        named = {str(each["name"]): each.get("template") for each in several}
        if "default" not in named:
            raise InputError(
                f"{path} has the chat templates {', '.join(named)}, and no default; {way_out}"
            )
        template = named["default"]
    if template is None or isinstance(template, str):
        return template
    raise InputError(
        f"chat_template is {template!r:.100} in {path}; it must be a text, or a list of objects "
        f"with a name and a template; correct it, or {way_out}"
    )


def read_template(path: AnyPath, tokens: Mapping[str, str]) -> ChatFormat:
    """The template in a file; an InputError if it can't be read."""
    try:
        return ChatFormat(read_inside(path).decode("utf-8"), tokens, str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"the chat template {path} can't be read as text: {error}; set "
            "--config.data.chat_template=plain, or FILE.jinja"
        ) from error


def read_settings(path: AnyPath) -> dict:
    """The JSON object in a file, {} if there is none; an InputError if it can't be read."""
    try:
        return read_json_object(path) if path.exists() else {}
    except (OSError, ValueError) as error:
        raise InputError(f"{path} can't be read: {describe_error(error)}; restore it") from error


def special_token(token: object) -> str | None:
    """The text of a special token, which may be given by an object with more properties."""
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None
