"""A Llama of 7B, 32 steps or layers: a size beyond the paper's, to plan and to start from.

    python -m t5x_diffeq.plan --config=configs/llama7b.py --topology=v5p:8x8x8 \\
        --config.model.remat=keep:qkv,attention,mlp

Shapes and batch are Llama 7B's (Touvron et al. 2023): 4M tokens per step, in sequences of
2048. Its learning rate, 3e-4, was not tuned for the ODE. With T = 96 the ODE has 20B parameters,
from which it makes as many weights as the baseline has, 6.5B.

Variants: `:ode` (default), `:compact`, `:smooth`, `:baseline`, `:shared`.
"""

from ml_collections import ConfigDict

from configs import default, llama1b


def get_config(variant: str = "ode") -> ConfigDict:
    """32 steps, width 4096, MLP 11008, 32 heads, T = 96, S = 256."""
    config = llama1b.get_config(variant)
    config.model.num_steps = 32
    config.model.embed_dim = 4096
    config.model.num_heads = 32
    config.model.mlp_dim = 11008
    config.train.batch_size = 2048
    config.train.eval_batch_size = 2048
    return default.set_variant(config, variant)
