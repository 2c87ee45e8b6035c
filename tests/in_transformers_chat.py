"""Run where transformers is, by transformers_test.py: its tokenizers write conversations as ours.

FOLDER holds tokenizers as they are exported, and in each `said.json` what ours makes of them.
"""

import json
import sys
from pathlib import Path

from transformers import AutoTokenizer


def check(folder: Path) -> None:
    said = json.loads((folder / "said.json").read_text())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer("a plain text").input_ids == said["opened"], folder.name
    messages = said["messages"]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == said["text"], folder.name
    prompt = tokenizer.apply_chat_template(
        messages[:-1], tokenize=False, add_generation_prompt=True
    )
    assert prompt == said["prompt"], folder.name
    found = tokenizer.apply_chat_template(
        messages, return_dict=True, return_assistant_tokens_mask=said["marked"]
    )
    assert list(found["input_ids"]) == said["tokens"], (folder.name, found["input_ids"])
    if said["marked"]:
        assert list(found["assistant_masks"]) == said["mask"], folder.name
    print(f"{folder.name}: agrees")


if __name__ == "__main__":
    for path in sorted(Path(sys.argv[1]).iterdir()):
        check(path)
