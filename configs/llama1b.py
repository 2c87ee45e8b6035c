"""Llama-1B, 16 steps or layers (paper, section 6.1: table 2; figure 8).

    launch/local.sh configs/llama1b.py:ode --config.data.path=...    (a baseline: `:baseline`)

The paper's run on OpenWebText: 40k steps of 256 sequences of 2048 tokens. Read off the paper's
plots, the perplexity is 9.7 for the ODE and 10.2 for the baseline. The ODE follows the official
code, with which that figure was made: the MLP reads the attention's normed input, block norms have
a shift and epsilon 1e-6, and weight decay of 1e-5 applies to all parameters.

The defaults work on any number of devices. Where there is memory for it, a step is faster with

    --config.model.remat=keep:qkv,attention,mlp

and, on two slices of v5p:4x4x4, with --config.mesh.data=4 --config.mesh.fsdp=32 as well.
docs/lab/planning.md has the estimates, and `plan --sweep` finds such flags for other devices.

Variants: `:ode` (default), `:compact`, `:smooth`, `:baseline`, `:shared`.
"""

from ml_collections import ConfigDict

from configs import paper


def get_config(variant: str = "ode") -> ConfigDict:
    """16 steps, width 2048, MLP 8192, T = 96, S = 256."""
    config = paper.training()
    config.model.architecture = "llama"
    config.model.num_steps = 16
    config.model.embed_dim = 2048
    config.model.num_heads = 16
    config.model.mlp_dim = 8192
    config.model.time_embed_dim = 96
    config.model.num_frequencies = 256
    config.data.tokenizer_vocab_size = 32_000
    config.data.sequence_length = 2048
    config.optimizer.beta2 = 0.95
    config.optimizer.weight_decay = 1e-5
    paper.set_variant(config, variant)
    if variant == "ode":
        config.model.norm_eps = 1e-6
        config.model.norm_shift = True
        config.model.mlp_input = "attention_norm"
        config.optimizer.decay = "all"
    return config
