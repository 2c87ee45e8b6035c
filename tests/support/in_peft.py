"""Run where torch, transformers and peft are, by transformers_test.py: tunes exported models.

    python in_peft.py FOLDER...

FOLDER/out is an exported model. LoRA takes two optimizer steps on it; FOLDER/adapter is what PEFT
saves, FOLDER/merged the model with its tokenizer, as docs/huggingface.md has it, and
FOLDER/logits.npy what the model then says of FOLDER/tokens.npy.
"""

import sys
from pathlib import Path

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

TARGETS = {  # and how PEFT initialises the factors: PiSSA also changes the base's kernels
    "gpt": (["c_attn", "attn.c_proj"], True),
    "llama": (["q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"], "pissa"),
}

if __name__ == "__main__":
    for folder in map(Path, sys.argv[1:]):
        torch.manual_seed(0)
        modules, begin = TARGETS[folder.name]
        base = AutoModelForCausalLM.from_pretrained(folder / "out")
        lora = LoraConfig(r=3, lora_alpha=5, target_modules=modules, init_lora_weights=begin)
        model = get_peft_model(base, lora)
        tokens = torch.from_numpy(np.load(folder / "tokens.npy"))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        for _ in range(2):
            optimizer.zero_grad()
            model(tokens, labels=tokens).loss.backward()
            optimizer.step()
        model.save_pretrained(folder / "adapter")
        with torch.no_grad():
            np.save(folder / "logits.npy", model.eval()(tokens).logits.numpy())
        model.merge_and_unload().save_pretrained(folder / "merged")
        AutoTokenizer.from_pretrained(folder / "out").save_pretrained(folder / "merged")
