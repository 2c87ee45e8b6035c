"""Obeys the settings beside a tokenizer's file that change its tokens, or refuses them by name.

As in transformers 5.24, tokens are added with the options in `added_tokens_decoder`, and a special
token is found in a text by its name. The tokenizer that results needs no settings.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from t5x_diffeq.data.chat_template import ChatFormat, read_settings, special_token
from t5x_diffeq.data.fast_tokenizer import parse_sentencepiece
from t5x_diffeq.data.file_tokenizers import JSON_FILE, FileTokenizer, HuggingFaceTokenizer
from t5x_diffeq.system.errors import InputError
from t5x_diffeq.system.files import AnyPath, parse_json

CONFIG_FILE = "tokenizer_config.json"
_ADDED_FILE, _MAP_FILE = "added_tokens.json", "special_tokens_map.json"
# Keys of `tokenizer_config.json` that are obeyed, or compared with `tokenizer.json`.
_READ = {
    *("add_prefix_space", "add_bos_token", "add_eos_token", "split_special_tokens", "legacy"),
    *("added_tokens_decoder", "additional_special_tokens", "extra_special_tokens"),
    "chat_template",
}
# Keys that don't change the tokens of a text: who wrote the file, how rows are padded and cut (runs
# do neither), how tokens become text (a run gives the text as it is).
_HARMLESS = {
    *("tokenizer_class", "processor_class", "auto_map", "name_or_path", "_name_or_path"),
    *("transformers_version", "_commit_hash", "backend", "is_local", "local_files_only"),
    *("tokenizer_file", "vocab_file", "merges_file", "special_tokens_map_file", "use_fast"),
    *("trust_remote_code", "revision", "device_map", "unsloth_version", "vocab_size"),
    *("model_max_length", "max_length", "max_len", "stride", "truncation", "truncation_side"),
    *("truncation_strategy", "padding", "padding_side", "pad_to_multiple_of", "return_tensors"),
    *("pad_token_type_id", "model_input_names", "return_token_type_ids", "trim_offsets"),
    *("clean_up_tokenization_spaces", "spaces_between_special_tokens", "errors"),
    *("use_default_system_prompt", "chat_control_tokens", "response_schema"),
}
_REWRITE = "(AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER))"


def obey_settings(tokenizer: FileTokenizer, path: AnyPath) -> FileTokenizer:
    """The tokenizer of the file `path` with the settings beside it.

    Raises:
      InputError: if a setting is unknown, contradicts the file, or can't be obeyed.
    """
    folder, chat = path.parent, tokenizer.chat
    settings = read_settings(folder / _MAP_FILE) | read_settings(folder / CONFIG_FILE)
    is_json = isinstance(tokenizer, HuggingFaceTokenizer)
    in_json = settings_in_json(tokenizer.model if is_json else None)
    for key, value in settings.items():
        if key in in_json and value is not None and value != in_json[key]:
            raise InputError(
                f"{folder / CONFIG_FILE}: {key} is {value!r}, and {path.name} says "
                f"{in_json[key]!r}; make them agree {_REWRITE}"
            )
        if value and key not in _READ | _HARMLESS | chat.tokens.keys() | in_json.keys():
            raise InputError(
                f"{folder / CONFIG_FILE}: {key} is {value!r:.100}; the key is unknown and may "
                f"change the tokens of a text; if it doesn't, remove it from there"
            )
    obey = _obey_json if is_json else _obey_model
    content, before, after = obey(tokenizer, path, settings)
    if content != tokenizer.model:
        tokenizer = type(tokenizer)(content, tokenizer.token_name(tokenizer.end_of_text))
        tokenizer.chat = chat
    _check_names(tokenizer, path, _named(folder, settings, chat))
    if len(before) > 1 or after not in ([], [tokenizer.end_of_text]):
        around = [[*map(tokenizer.token_name, tokens)] for tokens in (before, after)]
        raise InputError(
            f"{path} puts {around[0]} before and {around[1]} after every text; a run can put one "
            f"token before it, and data.end_of_text after it, which is "
            f"{tokenizer.token_name(tokenizer.end_of_text)}"
        )
    tokenizer.open_with(before[0] if before else None)
    return tokenizer


def settings_in_json(model: bytes | None) -> dict[str, Any]:
    """The settings that a `tokenizer.json` contains and `tokenizer_config.json` can have, too."""
    if model is None:
        return {}
    content = parse_json(model)
    steps = [*_steps(content.get("normalizer")), *_steps(content.get("pre_tokenizer"))]
    bert = next((step for step in steps if step["type"] == "BertNormalizer"), {})
    return {
        "add_prefix_space": any(
            step["type"] == "Prepend"
            or step.get("prepend_scheme", "never") != "never"
            or bool(step.get("add_prefix_space"))
            for step in steps
        ),
        "do_lower_case": bert.get("lowercase", False),
        "strip_accents": bert.get("strip_accents") or False,
        "tokenize_chinese_chars": bert.get("handle_chinese_chars", False),
    }


def _steps(step: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    if step is not None:
        yield step
        for each in step.get("normalizers", step.get("pretokenizers", ())):
            yield from _steps(each)


def _named(folder: AnyPath, settings: Mapping[str, Any], chat: ChatFormat) -> dict[str, int | None]:
    """The tokens that the files beside a tokenizer name, with their ids where these are given."""
    extra = settings.get("extra_special_tokens") or []
    extra = [*extra.values()] if isinstance(extra, dict) else extra
    texts = map(special_token, [*extra, *(settings.get("additional_special_tokens") or [])])
    named: dict[str, int | None] = dict.fromkeys(chat.tokens.values())
    named |= {text: None for text in texts if text is not None}
    for number, token in (settings.get("added_tokens_decoder") or {}).items():
        named[str(special_token(token))] = int(number)
    return named | read_settings(folder / _ADDED_FILE)


def _check_names(tokenizer: FileTokenizer, path: AnyPath, named: Mapping[str, int | None]) -> None:
    lacking = [
        name
        for name, number in named.items()
        if (token := tokenizer.token_id(name)) is None or number not in (None, token)
    ]
    if lacking:
        raise InputError(
            f"{path} doesn't have {len(lacking)} tokens that the files beside it name, such as "
            f"{lacking[0]}; write a {JSON_FILE} with all of them {_REWRITE}"
        )


def _obey_model(
    tokenizer: FileTokenizer, path: AnyPath, settings: Mapping[str, Any]
) -> tuple[bytes, list[int], list[int]]:
    """The sentencepiece model with the settings, and the tokens before and after every text."""
    wanted, chats = settings.get("add_prefix_space"), tokenizer.chat.template is not None
    content = tokenizer.model
    if wanted is not None or (chats and settings.get("legacy") is False):
        proto = parse_sentencepiece(content)
        rules = proto.normalizer_spec
        if wanted not in (None, rules.add_dummy_prefix):
            rules.add_dummy_prefix = wanted
            content = proto.SerializeToString()
        if rules.add_dummy_prefix and chats and settings.get("legacy") is False:
            raise InputError(
                f"{path.parent / CONFIG_FILE}: legacy is False, and of {path.name} alone every "
                f"part of a chat begins with a space; write a {JSON_FILE} {_REWRITE}"
            )
    around: list[list[int]] = []
    for key in ("bos_token", "eos_token"):
        name = tokenizer.chat.tokens.get(key, tokenizer.special_tokens.get(key))
        if not settings.get(f"add_{key}"):
            around.append([])
        elif name is not None and (token := tokenizer.token_id(name)) is not None:
            around.append([token])
        else:
            raise InputError(
                f"{path.parent / CONFIG_FILE} says add_{key}, and its {key} {name!r} isn't in the "
                f"tokenizer; name one that it has, or set add_{key} to false"
            )
    return content, around[0], around[1]


def _obey_json(
    tokenizer: FileTokenizer, path: AnyPath, settings: Mapping[str, Any]
) -> tuple[bytes, list[int], list[int]]:
    """The `tokenizer.json` with the settings, and the tokens before and after every text."""
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as Processor

    processor = Processor.from_str(tokenizer.model.decode())
    if getattr(processor.model, "dropout", None):
        raise InputError(
            f"{path}: dropout is {processor.model.dropout}, which draws other tokens each time; "
            "set it to null"
        )
    written = processor.to_str()
    processor.no_padding()
    processor.no_truncation()
    added = {repr(each) for each in processor.get_added_tokens_decoder().values()}
    decoder = settings.get("added_tokens_decoder") or {}
    # Tokens are added in the order of their ids, because the library numbers them in that order.
    for _, options in sorted(decoder.items(), key=lambda item: int(item[0])):
        token = AddedToken(**{k: v for k, v in options.items() if k != "__type"})
        if repr(token) not in added:
            processor.add_tokens([token])
    known = {each.content for each in processor.get_added_tokens_decoder().values()}
    named = _named(path.parent, {**settings, "added_tokens_decoder": {}}, tokenizer.chat)
    names = dict.fromkeys([*named, tokenizer.token_name(tokenizer.end_of_text)])
    words = [
        name for name in names if name not in known and processor.token_to_id(name) is not None
    ]
    processor.add_special_tokens(words)
    changed = processor.to_str()
    if settings.get("split_special_tokens"):
        changed = _without_names(json.loads(changed), path)
    content = tokenizer.model if changed == written else changed.encode()
    return content, *_specials_around(processor)


def _without_names(content: dict[str, Any], path: AnyPath) -> str:
    """The content whose special tokens aren't found in a text: split_special_tokens."""
    special = [token for token in content["added_tokens"] if token["special"]]
    model = content["model"]
    if model["type"] != "BPE" or any(token["content"] not in model["vocab"] for token in special):
        raise InputError(
            f"{path.parent / CONFIG_FILE}: split_special_tokens is True, which is supported for "
            "byte-pair encodings whose vocabulary holds the special tokens; remove it"
        )
    content["added_tokens"] = [token for token in content["added_tokens"] if not token["special"]]
    return json.dumps(content, ensure_ascii=False)


def _specials_around(processor: Any) -> tuple[list[int], list[int]]:
    """The tokens that a tokenizer's template puts before and after every text."""
    from tokenizers import Tokenizer as Processor
    from tokenizers.models import WordLevel

    if processor.post_processor is None:
        return [], []
    # The library doesn't show its template, so a text of one word shows what it puts around a text.
    probe = Processor(WordLevel({"x": 0}, "x"))
    probe.post_processor = processor.post_processor
    encoded = probe.encode("x")
    word = encoded.special_tokens_mask.index(0)
    return encoded.ids[:word], encoded.ids[word + 1 :]
