"""Terms of one's own: a bonus for the entropy of predictions, and a penalty of large states.

python -m examples.own_term
"""

# %%
from dataclasses import dataclass
from pathlib import Path

import jax.numpy as jnp

import t5x_diffeq as td
from t5x_diffeq.training.tracking.jsonl import read_metrics

# Where a config finds them. A negative weight makes a term a bonus.
NAMES = ("examples.own_term:Entropy(weight=-0.01)", "examples.own_term:Size(weight=0.001, power=4)")


# %% A term of the logits has its value and, side by side, its gradient.
class Entropy(td.LogitsTerm):
    """H = -sum q log q of the next token; its gradient is -q (log q + H)."""

    name = "entropy"

    def value(self, logits):
        """A number per token. A device may have a part of the vocabulary: `vocabulary.sum` adds."""
        log_q = logits.log_probabilities(0)
        return -logits.vocabulary.sum(jnp.exp(log_q) * log_q)

    def pull_back(self, logits, d):
        """The gradient of the logits, given the gradient `d` of the values."""
        log_q = logits.log_probabilities(0)
        return -d[:, None] * jnp.exp(log_q) * (log_q + self.value(logits)[:, None])


# %% A term of the states is the mean over depth of a rate, whose gradient JAX derives.
@dataclass(frozen=True)
class Size(td.StatesTerm):
    """The mean over width of a power of the state."""

    name = "size"
    power: int = 2

    def rate(self, y, velocity):
        """A number per token."""
        return (y.astype(jnp.float32) ** self.power).mean(-1)


# %% The config names them; their means are in metrics.jsonl and in the trackers.
if __name__ == "__main__":
    config = td.load_config(
        "configs/tiny.py",
        {
            "train.terms": NAMES,
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
    td.train(config, "workdirs/own_term")
    for line in read_metrics(Path("workdirs/own_term")):
        if "train/entropy" in line:
            print(line["step"], line["train/entropy"], line["train/size"])
