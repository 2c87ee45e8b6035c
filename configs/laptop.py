"""The paper's experiments at the size of a laptop: bytes of text, 128 wide, 12 steps or layers.

    launch/local.sh configs/laptop.py:ode [--config.model.num_steps=18 ...]

`launch/reproduce/` runs it unless the paper's own sizes are asked for; the text is the standard
library of the running Python by default. Learning rates are the best of a sweep on that text.

Variants: `:ode` (default), `:compact`, `:smooth`, `:baseline`, `:shared`.
"""

from ml_collections import ConfigDict

from configs import default


def get_config(variant: str = "ode") -> ConfigDict:
    """1000 steps of 8 sequences of 64 bytes."""
    config = default.get_config()
    config.model.embed_dim = 128
    config.model.mlp_dim = 512
    config.model.remat = "none"
    config.data.tokenizer = "bytes"
    config.data.sequence_length = 64
    config.train.total_steps = 1000
    config.train.batch_size = 8
    config.train.eval_batches = 64
    config.train.log_every = 50
    config.train.checkpoint_every = 250
    config.optimizer.learning_rate = 1e-3 if variant == "baseline" else 2e-3
    config.optimizer.beta2 = 0.99
    config.optimizer.weight_decay = 0.1
    return default.set_variant(config, variant)
