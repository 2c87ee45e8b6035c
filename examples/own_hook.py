"""A hook of one's own: the norm of the parameters, while the model trains.

python -m examples.own_hook
"""

# %%
from pathlib import Path

import optax

import t5x_diffeq as td
from t5x_diffeq.training.tracking.jsonl import read_metrics

NAME = "examples.own_hook:ParameterNorm(every=10)"  # where a config finds it


# %% A hook is made with the run, runs every so many steps, and returns numbers by name.
class ParameterNorm(td.Hook):
    """Writes `parameter_norm/all`. Every process calls it, so it may compute on all devices."""

    name = "parameter_norm"

    def __init__(self, training, every=100):
        super().__init__(training, every)

    def run(self, position):
        """The norm after `position.step` optimizer steps."""
        return {"parameter_norm/all": float(optax.global_norm(position.state.params))}


# %% The config names it; its numbers are in metrics.jsonl and in the trackers.
if __name__ == "__main__":
    config = td.load_config(
        "configs/tiny.py",
        {
            "train.hooks": (NAME,),
            "model.num_steps": 2,
            "model.embed_dim": 64,
            "model.mlp_dim": 128,
            "data.tokenizer": "bytes",
            "data.sequence_length": 64,
            "train.total_steps": 20,
            "train.eval_batches": 2,
            "train.eval_all_at_end": False,
        },
    )
    td.train(config, "workdirs/own_hook")
    for line in read_metrics(Path("workdirs/own_hook")):
        if "parameter_norm/all" in line:
            print(line)
