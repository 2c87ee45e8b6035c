"""What a folder of Hugging Face says besides its model, and training doesn't change.

Which tokens begin and end a text and stop a generation (there can be several), how tokens are drawn
by default, and how the library's tokenizer behaves. `convert` keeps all of it beside the run's
tokenizer, and `export` writes it again.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from t5x_diffeq.data.chat_template import read_settings

GENERATION_FILE, TOKENIZER_FILE = "generation_config.json", "tokenizer_config.json"
_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")  # in `config.json`
# What the run decides, or would name code; and what says which version wrote the file.
_NOT_KEPT = {
    GENERATION_FILE: ("transformers_version", "_from_model_config"),
    TOKENIZER_FILE: ("chat_template", "model_max_length", "auto_map", "name_or_path"),
}


def read_imported(folder: Path, found: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """What the folder says: by file, the keys that are kept.

    Args:
      folder: the folder.
      found: its `config.json`.

    Raises:
      InputError: if a file is damaged.
    """
    kept = {"config.json": {key: found[key] for key in _IDS if key in found}}
    for file, left_out in _NOT_KEPT.items():
        content = read_settings(folder / file)
        kept[file] = {key: value for key, value in content.items() if key not in left_out}
    return kept
