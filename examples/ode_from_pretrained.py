"""A neural ODE made of a per-layer model, which computes the same on the model's own grid.

    python -m examples.ode_from_pretrained

The per-layer model is trained here, and exported in Hugging Face's format. For a folder of a Llama
or another supported model (docs/huggingface.md), set FOLDER to it, drop data.tokenizer
from TEXT, skip the second cell, and leave out what uses `layers`. Needs safetensors:
pip install -e '.[export]'.
"""

# %%
import subprocess
import sys

import t5x_diffeq as td

FOLDER = "workdirs/exported"  # in Hugging Face's format
TEXT = ("--config.data.source=stdlib", "--config.data.tokenizer=bytes")


def verb(name, *arguments):
    """Runs a verb of the command line."""
    subprocess.run([sys.executable, "-m", f"t5x_diffeq.{name}", *arguments], check=True)


# %% A model with one set of weights per layer.
config = td.load_config(
    "configs/tiny.py:baseline",
    {
        "model.num_steps": 4,
        "model.embed_dim": 64,
        "model.mlp_dim": 256,
        "data.tokenizer": "bytes",
        "data.sequence_length": 64,
        "train.total_steps": 40,
        "train.eval_batches": 2,
        "train.eval_all_at_end": False,
    },
)
layers = td.train(config, "workdirs/layers")
verb("export", "--workdir=workdirs/layers", f"--output={FOLDER}")

# %% Its layers become the values of W(t) at the nodes t = 1/4, 1/2, 3/4, 1.
verb("convert", f"--input={FOLDER}", "--workdir=workdirs/ode", "--to_ode", *TEXT)
ode = td.load("workdirs/ode")

# %% On that grid both compute the same. On other grids only the ODE exists.
text = "def main():"
print(f"layers {layers.loss(text):.5f}, ode {ode.loss(text):.5f} nats per token")
for steps in (3, 4, 5, 8):
    print(steps, "steps:", ode.at_depth(steps).evaluate(eval_batches=2)["perplexity"])
