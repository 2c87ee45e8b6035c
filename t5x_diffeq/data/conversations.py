"""Records of instruction data: `messages`, or a `prompt` with its `completion`.

Sources give documents as text. So a conversation is a document of JSON, in one of two forms:
`{"messages": [...], "tools": [...]}` (`tools` only where the record has them) and
`{"prompt": "...", "completion": "..."}`. `conversation_of` makes the document from a record in any
of the usual formats; `encoding` makes tokens of the document.
"""

import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from t5x_diffeq.system.errors import InputError
from t5x_diffeq.system.files import parse_json

ANSWERER = "assistant"  # the role whose messages are trained on
_ROLES = {"human": "user", "gpt": ANSWERER}  # ShareGPT's names
KEYS = ("messages", "conversations", "prompt", "completion", "tools")


def fields_of(names: Collection[str], field: str | None, where: str) -> list[str]:
    """The fields of a record that make a document: `field`, or if None, a conversation's fields.

    Raises:
      InputError: if the record lacks these fields.
    """
    if field is None:
        return keys_of_conversations(names, where)
    if field in names:
        return [field]
    way_out, template = "set --config.data.text_field", ""
    if not {"messages", "conversations"}.isdisjoint(names):
        template = " and --config.data.chat_template=plain, or FILE.jinja"
    if template or {"prompt", "completion"} <= {*names}:
        way_out += f", or train on conversations: --config.data.loss_on=completion{template}"
    if "." in field and field.partition(".")[0] in names:
        way_out = "a field within another can't be named: move the text to the top of its record"
    has = ", ".join(names)[:200] or "nothing at all"
    raise InputError(f"{where} has no {field!r}, but {has}; {way_out}")


def keys_of_conversations(names: Collection[str], where: str) -> list[str]:
    """The fields that make a conversation of a record; an InputError if they make none."""
    keys = [key for key in KEYS if key in names]
    if {"messages", "conversations"}.isdisjoint(keys) and not {"prompt", "completion"} <= {*keys}:
        has = ", ".join(names)[:200] or "nothing at all"
        raise InputError(
            f"{where} has {has}; data.loss_on=completion needs messages (a list of role and "
            "content) or prompt and completion"
        )
    return keys


def conversation_of(record: Mapping[str, Any], where: str) -> str:
    """The document of a record at `where`; an InputError if it holds no conversation.

    A library's records may hold bytes for text, and a mapping of lists for a list of mappings.
    """
    keys = keys_of_conversations([key for key in record if record[key] is not None], where)
    fields = {key: _plain(record[key]) for key in keys}
    if "messages" in fields or "conversations" in fields:
        conversation = {"messages": _messages_of(fields, where)}
        conversation |= {"tools": fields["tools"]} if fields.get("tools") else {}
    else:
        conversation = {key: fields[key] for key in ("prompt", "completion")}
        for key, text in conversation.items():
            if not isinstance(text, str):
                raise InputError(
                    f"{where}: its {key!r} is {text!r:.60}, not text; lists of messages belong in "
                    "the field messages"
                )
    return json.dumps(conversation, ensure_ascii=False)


def _plain(value: Any) -> Any:
    """The value in JSON's types; keys without a value are left out."""
    if isinstance(value, bytes):
        return value.decode("utf-8", "surrogateescape")
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items() if each is not None}
    if hasattr(value, "tolist"):  # NumPy's arrays and numbers
        return _plain(value.tolist())
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value


def _messages_of(fields: dict, where: str) -> list[dict]:
    """The messages as transformers' templates expect them, with `role` and `content`."""
    key = "messages" if "messages" in fields else "conversations"
    messages = fields[key]
    if isinstance(messages, dict) and _has_equal_lists(messages):  # tfds and old datasets
        messages = [
            dict(zip(messages, each, strict=True)) for each in zip(*messages.values(), strict=True)
        ]
    if not isinstance(messages, list) or not messages:
        raise InputError(f"{where}: its {key!r} is {messages!r:.60}, not a list of messages")
    for number, message in enumerate(messages):
        if isinstance(message, dict) and {"from", "value"} <= message.keys():
            role = message.pop("from")
            message.update(role=_ROLES.get(role, role), content=message.pop("value"))
        if fault := _fault_of(message):
            raise InputError(f"{where}: message {number} of its {key!r} {fault}")
    return messages


def _has_equal_lists(columns: dict) -> bool:
    """Whether a mapping of lists stands for a list of mappings, and isn't a single message."""
    lists = columns.values()
    return all(isinstance(each, list) for each in lists) and len({*map(len, lists)}) == 1


def _fault_of(message: object) -> str | None:
    if not isinstance(message, dict):
        return f"is {message!r:.60}, not an object with role and content"
    if not isinstance(message.get("role"), str):
        return f"has no role, but only {', '.join(message)[:200] or 'nothing'}"
    if "content" not in message and "tool_calls" not in message:
        return f"has no content, but only {', '.join(message)[:200]}"
    if not isinstance(message.get("content", ""), str):
        return f"has the content {message['content']!r:.60}; it must be one text"
    return None


def find_text_fault(text: str) -> str | None:
    """Why a text can't be trained on (it is then skipped and counted), or None if it can."""
    if not text or text.isspace():
        return "empty"
    if "\0" in text:
        return "with a NUL character"
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:  # a lone surrogate stands for an undecodable byte
        return "not UTF-8"
    return None


def find_conversation_fault(conversation: dict) -> str | None:
    """Why a conversation can't be trained on (it is then skipped and counted), or None."""
    faults = map(find_text_fault, _texts_in(conversation))
    if fault := next((each for each in faults if each not in (None, "empty")), None):
        return fault
    if "prompt" in conversation:
        return "with an empty completion" if not conversation["completion"].strip() else None
    answers = [each for each in conversation["messages"] if each["role"] == ANSWERER]
    if not answers:
        roles = sorted({each["role"] for each in conversation["messages"]})
        return f"without a message of the role {ANSWERER}, but of {', '.join(roles)[:60]}"
    full = [each for each in answers if each.get("content", "").strip() or "tool_calls" in each]
    return None if len(full) == len(answers) else f"with an empty message of the {ANSWERER}"


def _texts_in(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _texts_in(each)


def text_of_conversation(document: str) -> str:
    """The texts of a conversation's document, separated by newlines."""
    conversation = parse_json(document)
    texts = [each.get("content", "") for each in conversation.get("messages", [])]
    return "\n".join(texts or [conversation["prompt"], conversation["completion"]])
