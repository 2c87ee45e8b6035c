"""Reads a Hugging Face folder as our config, tokenizer and parameters."""

from dataclasses import replace
from pathlib import Path

from t5x_diffeq.config.config import Config
from t5x_diffeq.data.recipe import make_tokenizer
from t5x_diffeq.data.tokenizer import Tokenizer
from t5x_diffeq.hf.config_json import check_window, folder_family, is_tied, model_keys
from t5x_diffeq.hf.folder import TensorFiles
from t5x_diffeq.hf.layouts import TableSizes, params_of
from t5x_diffeq.hf.tokenizer_files import read_imported, token_of_id, tokenizer_file
from t5x_diffeq.model.config import ModelConfig
from t5x_diffeq.system.errors import InputError
from t5x_diffeq.system.files import parse_json

_TRAINED = "sentencepiece"  # the value of data.tokenizer that is not a file
_MULTIPLES = (1, 8, 64, 128)  # a vocabulary is usually padded to a multiple of one of these
# Buffers that other versions of the library stored beside the weights.
_BUFFERS = ("attn.bias", "attn.masked_bias", "rotary_emb.inv_freq")


def read_config_json(folder: Path) -> dict:
    """The content of `config.json`, which must be there (else: InputError)."""
    path = folder / "config.json"
    try:
        values = parse_json(path.read_bytes())
        if not isinstance(values, dict):
            raise ValueError("it is not an object")
        return values
    except FileNotFoundError as error:
        raise InputError(
            f"--input={folder} holds no config.json; name a folder that save_pretrained made, or a "
            "model of the Hugging Face Hub, such as Qwen/Qwen3-0.6B"
        ) from error
    except (ValueError, OSError) as error:
        raise InputError(f"{path} can't be read: {error}; restore it") from error


def with_model(config: Config, config_json: dict, length: int | None) -> tuple[Config, TableSizes]:
    """The config with the folder's model and length; and the number of rows of its tables.

    The sequence length is the folder's if it is None.

    Raises:
      InputError: if the architecture is not supported, or the length exceeds the folder's, or
        its window of attention.
    """
    keys, tables = model_keys(config_json)
    length = tables.positions if length is None else length
    if not 1 <= length <= tables.positions:
        raise InputError(
            f"--sequence_length={length} must be from 1 to the folder's {tables.positions}"
        )
    check_window(config_json, length)
    model_values = {f"model.{key}": value for key, value in keys.items()}
    return config.with_values({**model_values, "data.sequence_length": length}), tables


def with_tokenizer(config: Config, config_json: dict, folder: Path) -> tuple[Config, Tokenizer]:
    """The config with the folder's tokenizer, unless it names one; and the tokenizer.

    Raises:
      InputError: if there is none.
    """
    data, file = config.data, tokenizer_file(folder)
    is_theirs = data.tokenizer == _TRAINED
    imported = read_imported(folder, config_json) if is_theirs else {}
    if data.end_of_text is not None:
        for keys in imported.values():
            keys.pop("eos_token_id", None)
    if is_theirs:
        if file is None:
            raise InputError(
                f"--input={folder} holds neither tokenizer.model nor tokenizer.json; name its "
                "tokenizer with --config.data.tokenizer=FILE"
            )
        data = replace(data, tokenizer=str(file.absolute()))
    end = config_json.get("eos_token_id")
    end = end[0] if isinstance(end, list) else end
    if data.tokenizer != "bytes" and data.end_of_text is None and end is not None:
        name = token_of_id(Path(data.tokenizer).expanduser(), end)
        data = replace(data, end_of_text=name)
    tokenizer = make_tokenizer(data, [])
    tokenizer.imported = imported
    return replace(config, data=data), tokenizer


def check_vocabulary(tokenizer: Tokenizer, tables: TableSizes) -> int:
    """Checks that the model has a row per token, and no more than usual padding (else: InputError).

    Returns the number of rows that are padding.
    """
    tokens = tokenizer.vocab_size
    if tables.tokens not in (-(-tokens // multiple) * multiple for multiple in _MULTIPLES):
        raise InputError(
            f"--input: the model has vectors for {tables.tokens} tokens, and the tokenizer has "
            f"{tokens}; name the model's own with --config.data.tokenizer=FILE"
        )
    return tables.tokens - tokens


def pretrained_params(
    folder: Path, config_json: dict, config: ModelConfig, tables: TableSizes
) -> dict:
    """The parameters; InputError if a tensor is missing, left over or has another shape."""
    files = TensorFiles(folder)
    kind, family = folder_family(config_json)
    params = params_of(family.layout, config, tables, files.read)
    left_over = [
        name
        for name in files.unread_names()
        if not name.endswith(_BUFFERS)
        and not (name == "lm_head.weight" and is_tied(config_json, family))
    ]
    if left_over:
        raise InputError(
            f"--input={folder} holds {left_over[0]} ({len(left_over)} such), which a plain "
            f"{kind} doesn't have; it can't be converted"
        )
    return params
