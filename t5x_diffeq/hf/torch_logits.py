"""Computes the logits of an exported folder in PyTorch; `check_folder.py` starts it as a process.

    python -P torch_logits.py FOLDER CLASS TOKENS.npy LOGITS.npy [ADAPTER]

It writes the logits of the tokens. If the packages are missing or don't have the class, it prints
why and ends with 3. It imports nothing of t5x_diffeq, so that JAX doesn't run beside PyTorch.
"""

import json
import sys
from pathlib import Path

CANNOT_COMPARE = 3


def main(folder: str, model_class: str, tokens: str, logits: str, *adapter: str) -> int:
    """Loads the folder in float32 on the CPU; returns the exit status."""
    try:
        import numpy as np
        import torch
        import transformers

        has_code = "auto_map" in json.loads((Path(folder) / "config.json").read_text("utf-8"))
        kind = (
            transformers.AutoModelForCausalLM
            if has_code
            else getattr(transformers, model_class, None)
        )
        if kind is None:
            raise ImportError(f"transformers {transformers.__version__} has no {model_class}")
        if adapter:
            import peft
    except ImportError as error:
        print(error)
        return CANNOT_COMPARE
    model = kind.from_pretrained(folder, trust_remote_code=has_code)
    if adapter:
        model = peft.PeftModel.from_pretrained(model, adapter[0])
    with torch.no_grad():
        computed = model.float().eval()(torch.from_numpy(np.load(tokens))).logits
    np.save(logits, computed.numpy())
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
