"""The first run: a small ODE transformer on the standard library's source text, in minutes.

    launch/local.sh configs/tiny.py             # also :compact, :smooth, :baseline, :shared

Two CPU cores train it in a few minutes. The README says what to expect.
"""

from ml_collections import ConfigDict

from configs import default


def get_config(variant: str = "ode") -> ConfigDict:
    """6 Euler steps, width 128; or a baseline of as many layers, or of shared weights."""
    config = default.get_config()
    config.model.num_steps = 6
    config.model.embed_dim = 128
    config.model.mlp_dim = 512
    config.model.time_embed_dim = 24
    config.model.num_frequencies = 32
    config.model.remat = "none"
    config.data.tokenizer_vocab_size = 2048
    config.data.sequence_length = 128
    config.train.total_steps = 300
    config.train.batch_size = 16
    config.train.eval_every = 150
    config.train.eval_batches = 8  # of about 47
    config.train.eval_all_at_end = True
    config.train.checkpoint_every = 100
    config.train.log_every = 20
    config.optimizer.learning_rate = 3e-3
    config.optimizer.warmup_fraction = 0.1
    return default.set_variant(config, variant)
