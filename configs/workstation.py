"""A batch at which a step of the ODE takes about the baseline's time: 192 wide, 12 steps or layers.

    python -m studies.equal_time --text=stdlib --text=shakespeare=tinyshakespeare.txt

8192 bytes per optimizer step are few for a model of this width, but enough that making W(t) is a
small part of the step, because W(t) is made once for all tokens. The step is computed in eight
microbatches, which suits the caches of a CPU and takes 0.6 GB instead of 3.6.

Variants: `:ode` (default), `:compact`, `:smooth`, `:baseline`, `:shared`.
"""

from ml_collections import ConfigDict

from configs import default


def get_config(variant: str = "ode") -> ConfigDict:
    """200 steps of 64 sequences of 128 bytes."""
    config = default.get_config()
    config.model.embed_dim = 192
    config.model.num_heads = 6
    config.model.mlp_dim = 768
    config.model.remat = "none"
    config.data.tokenizer = "bytes"
    config.data.sequence_length = 128
    config.train.total_steps = 200
    config.train.batch_size = 64
    config.train.microbatches = 8
    config.train.eval_batch_size = 64
    config.train.eval_batches = 8
    config.train.log_every = 10
    config.train.eval_every = 50
    config.train.checkpoint_every = 50
    config.optimizer.learning_rate = 2e-3 if variant == "baseline" else 4e-3
    config.optimizer.beta2 = 0.99
    config.optimizer.weight_decay = 0.1
    config.optimizer.warmup_fraction = 0.05
    return default.set_variant(config, variant)
