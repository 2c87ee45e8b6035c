"""GPT-large, 36 steps or layers (paper, section 6.1: table 2; figures 7 and 14).

    launch/local.sh configs/gpt_large.py:ode --config.data.path=...    (a baseline: `:baseline`)

The paper's run on OpenWebText: 40k steps of 256 sequences of 1024 tokens, learning rate 3e-4,
beta2 0.95 (figure 7: better for the ODE than 0.999; for GPT it is the other way round). Epsilon is
1e-6, as in the official code's config. T = 96; 144 is better (figure 14):
`--config.model.time_embed_dim=144`. Its perplexity is in the paper's table 2; our copy
lacks the number.

Variants: `:ode` (default), `:compact`, `:smooth`, `:baseline`, `:shared`.
"""

from ml_collections import ConfigDict

from configs import paper


def get_config(variant: str = "ode") -> ConfigDict:
    """36 steps, width 1280, T = 96."""
    config = paper.gpt(num_steps=36, embed_dim=1280, num_heads=20, time_embed_dim=96)
    config.optimizer.beta2 = 0.95
    config.optimizer.epsilon = 1e-6
    return paper.set_variant(config, variant)
