"""Run where torch and transformers are, by transformers_test.py: a model on grids of any N.

    python in_transformers_hypernetwork.py FOLDER...

Beside each FOLDER, an export with --form=hypernetwork, stands FOLDER.npz: `tokens`, and by N the
logits of the run on that grid.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM


def load(folder, **options):
    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, **options).eval()


def check(folder):
    said = np.load(folder.with_suffix(".npz"))
    tokens = torch.from_numpy(said["tokens"])
    for number in sorted(set(said.files) - {"tokens"}):
        model, expected = load(folder, num_steps=int(number)), torch.from_numpy(said[number])
        with torch.no_grad():
            torch.testing.assert_close(model(tokens).logits, expected, atol=1e-4, rtol=0)
            options = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
            cached = model.generate(tokens[:1, :8], **options)
            assert (
                cached.tolist()
                == model.generate(tokens[:1, :8], **options, use_cache=False).tolist()
            )
            coefficient = next(model.model.steps.parameters())
            coefficient.data.add_(1.0)  # which PyTorch's version counter doesn't see
            assert not torch.allclose(model(tokens).logits, expected, atol=1e-2)
            coefficient.data = coefficient.data - 1.0
            torch.testing.assert_close(model(tokens).logits, expected, atol=1e-4, rtol=0)
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        assert all(parameter.grad.abs().max() > 0 for parameter in model.model.steps.parameters())
        with tempfile.TemporaryDirectory() as saved:
            model.save_pretrained(saved)
            again = load(saved)
        assert again.config.num_hidden_layers == int(number)
        with torch.no_grad():
            torch.testing.assert_close(again(tokens).logits, expected, atol=1e-4, rtol=0)
    print(f"{folder.name}: agrees")


if __name__ == "__main__":
    for folder in map(Path, sys.argv[1:]):
        check(folder)
