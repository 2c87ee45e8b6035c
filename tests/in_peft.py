"""Run where torch, transformers and peft are, by transformers_test.py: tunes exported models.

    python in_peft.py FOLDER...

FOLDER/out is an exported model. LoRA takes two optimizer steps on it; FOLDER/adapter is what PEFT
saves, and FOLDER/logits.npy what the model then says of FOLDER/tokens.npy.
"""

import sys
from pathlib import Path

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

TARGETS = {  # of GPT-2 and of Llama, and of our own class with either block
    "gpt": ["c_attn", "attn.c_proj"],
    "llama": ["q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "k_proj"],
    "gpt_ode": ["qkv", "attention.output", "down"],
    "llama_ode": ["query", "up", "attention.output"],
}

if __name__ == "__main__":
    for folder in map(Path, sys.argv[1:]):
        torch.manual_seed(0)
        base = AutoModelForCausalLM.from_pretrained(folder / "out", trust_remote_code=True)
        lora = LoraConfig(r=3, lora_alpha=5, target_modules=TARGETS[folder.name])
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
