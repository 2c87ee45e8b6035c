"""GPT-medium, 24 steps or layers (paper, section 6.1: tables 1 and 2).

    launch/local.sh configs/gpt_medium.py:ode --config.data.path=...    (a baseline: `:baseline`)

The paper's run: 40k steps of 256 sequences of 1024 tokens, learning rate 3e-4; T = 96 on
OpenWebText, 48 on WikiText-103 (`--config.model.time_embed_dim=48`). Its perplexities are in its
tables 1 and 2; our copy of the paper lacks the numbers.

Variants: `:ode` (default), `:compact`, `:smooth`, `:baseline`, `:shared`.
"""

from ml_collections import ConfigDict

from configs import paper


def get_config(variant: str = "ode") -> ConfigDict:
    """24 steps, width 1024, T = 96."""
    config = paper.gpt(num_steps=24, embed_dim=1024, num_heads=16, time_embed_dim=96)
    config.optimizer.beta2 = 0.999
    return paper.set_variant(config, variant)
