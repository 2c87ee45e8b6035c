"""The tiny Shakespeare benchmark: characters, 4 steps or layers, 128 wide.

    python -m t5x_diffeq.train --config=configs/shakespeare.py:ode --workdir=DIR \\
        --config.data.path=tinyshakespeare.txt

The text, the benchmark's 1.1 MB file, is not part of the project. The first 90% are for training,
the rest for validation. The well-known validation loss of the per-layer baseline is
1.88 nats per character, at learning rate 1e-3. Here each variant has the best of several learning
rates (docs/lab/settings.md), and the ODE has the best of several T. With T = 48 it takes 0.65 of
the time, and its loss is 0.007 higher (docs/lab/budgets.md). Weight decay is 0.1 for all.

Variants: `:ode` (default), `:compact`, `:smooth`, `:baseline`, `:shared`.
"""

from ml_collections import ConfigDict

from configs import default


def get_config(variant: str = "ode") -> ConfigDict:
    """2000 steps of 12 sequences of 64 bytes."""
    config = default.get_config()
    config.model.num_steps = 4
    config.model.embed_dim = 128
    config.model.num_heads = 4
    config.model.mlp_dim = 512
    config.model.time_embed_dim = 144
    config.model.remat = "none"
    config.data.source = "text_files"
    config.data.tokenizer = "bytes"
    config.data.sequence_length = 64
    config.train.total_steps = 2000
    config.train.batch_size = 12
    config.train.eval_batch_size = 120
    config.train.log_every = 50
    config.train.eval_every = 500
    config.train.checkpoint_every = 500
    config.optimizer.learning_rate = 4e-3
    config.optimizer.beta2 = 0.99
    config.optimizer.weight_decay = 0.1
    config.optimizer.warmup_fraction = 0.05
    config.optimizer.end_lr_fraction = 0.1
    return default.set_variant(config, variant)
