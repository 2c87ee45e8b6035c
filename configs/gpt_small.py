"""GPT-small, 12 steps or layers (paper, section 6.1: tables 1 and 2).

    launch/local.sh configs/gpt_small.py:ode --config.data.path=...     (a baseline: `:baseline`)

The paper's run on OpenWebText: 20k steps of 512 sequences of 1024 tokens, learning rate 6e-4. Read
off the paper's plots, the perplexity is 22.1 for the ODE and 22.6 for the baseline. On
WikiText-103: `--config.train.batch_size=256 --config.train.total_steps=10000`.

Variants: `:ode` (default), `:compact`, `:smooth`, `:baseline`, `:shared`.
"""

from ml_collections import ConfigDict

from configs import paper


def get_config(variant: str = "ode") -> ConfigDict:
    """12 steps, width 768, T = 20."""
    config = paper.gpt(num_steps=12, embed_dim=768, num_heads=12, time_embed_dim=20)
    config.train.total_steps = 20_000
    config.train.batch_size = 512
    config.train.eval_every = 200
    config.optimizer.learning_rate = 6e-4
    config.optimizer.beta2 = 0.999
    return paper.set_variant(config, variant)
