"""A Llama of 7B, 32 steps or layers: a size beyond the paper's, to plan and to start from.

    python -m t5x_diffeq.plan --config=configs/llama7b.py --topology=v5p:8x8x8

Shapes and batch are those of Llama 7B (Touvron et al. 2023): 4M tokens per step, sequences of 2048.
The learning rate is that model's too, and was not tuned for the ODE. T = 96 makes it 20B parameters,
of which a step uses no more than the baseline's 6.7B generated weights.

Variants: `:ode` (default), `:baseline`, `:shared`.
"""

from ml_collections import ConfigDict

from configs import llama1b


def get_config(variant: str = "ode") -> ConfigDict:
    """32 steps, width 4096, MLP 11008, 32 heads, T = 96, S = 256."""
    config = llama1b.get_config(variant)
    config.model.num_steps = 32
    config.model.embed_dim = 4096
    config.model.num_heads = 32
    config.model.mlp_dim = 11008
    config.train.batch_size = 2048
    config.train.eval_batch_size = 2048
    return config
