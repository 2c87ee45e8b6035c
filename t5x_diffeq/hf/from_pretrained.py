"""Reads a Hugging Face folder as our config, tokenizer and parameters."""

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from jaxtyping import Shaped

from t5x_diffeq.config.config import Config
from t5x_diffeq.data.recipe import make_tokenizer
from t5x_diffeq.data.tokenizer import ByteTokenizer, Tokenizer, as_list
from t5x_diffeq.data.tokenizer_folder import read_imported, token_names, tokenizer_file
from t5x_diffeq.hf.config_json import check_window, folder_family, is_tied, model_keys
from t5x_diffeq.hf.folder import FLOATS, TensorFiles
from t5x_diffeq.hf.layouts import TableSizes, params_of
from t5x_diffeq.model.config import ModelConfig
from t5x_diffeq.model.layers.rotary import rotary_table
from t5x_diffeq.system.errors import InputError
from t5x_diffeq.system.files import read_json_object

_TRAINED = "sentencepiece"  # the value of data.tokenizer that is not a file


def read_config_json(folder: Path) -> dict:
    """The content of `config.json`, which must be there (else: InputError)."""
    path = folder / "config.json"
    try:
        return read_json_object(path)
    except FileNotFoundError as error:
        raise InputError(
            f"--input={folder} holds no config.json; name a folder that save_pretrained made, or a "
            "model of the Hugging Face Hub, such as Qwen/Qwen3-0.6B"
        ) from error
    except (ValueError, OSError) as error:
        raise InputError(f"{path} can't be read: {error}; restore it") from error


def with_model(config: Config, config_json: dict, length: int | None) -> tuple[Config, TableSizes]:
    """The config with the folder's model and length; and the number of rows of its tables.

    If `length` is None, the sequence length is the folder's.

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
    """The config with the folder's tokenizer, unless the config names another; and the tokenizer.

    Raises:
      InputError: if neither the folder nor the config has a tokenizer.
    """
    data, file = config.data, tokenizer_file(folder)
    from_folder = data.tokenizer == _TRAINED
    imported = read_imported(folder, config_json)
    if data.end_of_text is not None:  # the config's token replaces the folder's
        for keys in imported.values():
            keys.pop("eos_token_id", None)
    if from_folder:
        if file is None:
            raise InputError(
                f"--input={folder} holds neither tokenizer.model nor tokenizer.json; name its "
                "tokenizer with --config.data.tokenizer=FILE"
            )
        data = replace(data, tokenizer=str(file.absolute()))
    ends = [end for keys in imported.values() for end in as_list(keys.get("eos_token_id"))]
    if data.tokenizer != "bytes" and ends:
        first, *_ = token_names(Path(os.path.expanduser(data.tokenizer)), ends)
        data = replace(data, end_of_text=first)
    tokenizer = make_tokenizer(data, [])
    if from_folder:
        tokenizer.imported = imported
    elif data.tokenizer != "bytes" and ends:
        tokenizer.imported = {"config.json": {"eos_token_id": [*dict.fromkeys(ends)]}}
    return replace(config, data=data), tokenizer


def check_vocabulary(tokenizer: Tokenizer, tables: TableSizes) -> int:
    """The number of rows that no token has; an InputError if a token has no row.

    There may be any number of such rows (Qwen's tables have 267 to 418). With the tokenizer `bytes`
    there may be none, because then another tokenizer is the model's own.
    """
    tokens = tokenizer.vocab_size
    unused_rows = tables.tokens - tokens
    if unused_rows < 0 and not isinstance(tokenizer, ByteTokenizer):
        raise InputError(
            f"--input: the model has vectors for {tables.tokens} tokens, and the tokenizer has "
            f"{tokens}; remove the tokens that were added, add their rows "
            "(resize_token_embeddings), or name another with --config.data.tokenizer=FILE"
        )
    if unused_rows and isinstance(tokenizer, ByteTokenizer):
        raise InputError(
            f"--input: the model has vectors for {tables.tokens} tokens, and the tokenizer has "
            f"{tokens}; name the model's own with --config.data.tokenizer=FILE"
        )
    return unused_rows


def pretrained_params(
    folder: Path, config_json: dict, config: ModelConfig, tables: TableSizes
) -> dict:
    """The parameters of a per-layer model, from the folder's tensors.

    A tensor that is no parameter here, such as a tied head or a mask, must equal what the model has
    or computes in its place.

    Raises:
      InputError: if a tensor is missing, left over, or has another shape, dtype or value.
    """
    files = TensorFiles(folder)
    kind, family = folder_family(config_json)
    params = params_of(family.layout, config, tables, files.read)
    tied = is_tied(config_json, family)
    table = params["token_embedding"]["table"][: config.vocab_rows]
    left_over = []
    for name in files.unread_names():
        if name == "lm_head.weight" and tied:
            if not np.array_equal(files.read(name, table.shape), table):
                keep = "" if family.tied_head is None else "write false to keep it, or "
                raise InputError(
                    f"--input={folder}: tie_word_embeddings is true, and {name} differs from the "
                    f"embedding; {keep}delete the tensor"
                )
        elif buffer := next((each for each in _BUFFERS if name.endswith(each)), None):
            if not _BUFFERS[buffer](files.stored(name, (*FLOATS, "BOOL", "U8")), config):
                raise InputError(
                    f"--input={folder}: {name} isn't what config.json makes it; correct "
                    "config.json, or delete the tensor if it is right"
                )
        else:
            left_over.append(name)
    if left_over:
        raise InputError(
            f"--input={folder} holds {left_over[0]} ({len(left_over)} such), which a plain "
            f"{kind} doesn't have; it can't be converted"
        )
    return params


def _is_causal_mask(mask: Shaped[np.ndarray, "..."], _: ModelConfig) -> bool:
    """Whether the mask is GPT-2's: `[1, 1, n, n]`, with ones where a token may read."""
    return mask.ndim == 4 and np.array_equal(mask, np.tril(np.ones((1, 1, *mask.shape[2:]))))


def _is_score_of_masked(score: Shaped[np.ndarray, "..."], _: ModelConfig) -> bool:
    """Whether the score of masked positions is -1e4 (which bfloat16 rounds) or lower."""
    return bool((score.astype(np.float32) <= -0.99e4).all())


def _are_frequencies(frequencies: Shaped[np.ndarray, "..."], config: ModelConfig) -> bool:
    """Whether these are the rotary frequencies; some versions stored them before scaling."""
    dtype = frequencies.dtype
    if not jnp.issubdtype(dtype, jnp.floating):
        return False
    rounding = jnp.finfo(dtype)
    return any(
        frequencies.shape == ours.shape
        and np.allclose(
            frequencies.astype(np.float32),
            ours,
            rtol=1e-5 + float(rounding.eps),
            atol=float(rounding.smallest_subnormal),
        )
        for ours, _ in (
            rotary_table(config.head_width, config.rope_theta, scaling)
            for scaling in (config.rope_scaling, ())
        )
    )


# Buffers that other versions of the library stored beside the weights, by the ends of their names.
# The function checks that a buffer has the values that are computed here.
_BUFFERS: Mapping[str, Callable[[Shaped[np.ndarray, "..."], ModelConfig], bool]] = {
    "attn.bias": _is_causal_mask,
    "attn.masked_bias": _is_score_of_masked,
    "rotary_emb.inv_freq": _are_frequencies,
}
