"""Sizes for the question whether a lead grows with compute: `python -m studies.ladder`.

    python -m t5x_diffeq.train --config=configs/ladder.py:compact-96 --workdir=DIR

A variant is a model and a width of RUNGS; without a width, the smallest. Each training sees 20
tokens for each parameter of the baseline's kernels, 12 N width^2, whatever the model, and an
optimizer step has width / 2 sequences of 128 tokens. So at a width all models see the same tokens
and do nearly the same FLOPs.
"""

from ml_collections import ConfigDict

from configs import default

# N by width; the last is GPT-small's.
RUNGS = {32: 6, 48: 6, 64: 6, 96: 8, 144: 10, 192: 12, 256: 12, 384: 12, 768: 12}
_TOKENS_PER_PARAMETER = 20


def get_config(variant: str = "ode") -> ConfigDict:
    """The model and its training.

    Raises:
      ValueError: if there is no such model or width.
    """
    model, _, width = variant.partition("-")
    width = width or str(min(RUNGS))
    if not width.isdigit() or int(width) not in RUNGS:
        raise ValueError(f"variant {variant!r} has another width than {list(RUNGS)}")
    config = default.get_config()
    config.model.embed_dim = int(width)
    config.model.num_heads = max(2, int(width) // 32)
    config.model.mlp_dim = 4 * int(width)
    config.model.num_steps = RUNGS[int(width)]
    config.model.remat = "none"
    config.data.tokenizer = "bytes"
    config.data.sequence_length = 128
    config.train.batch_size = int(width) // 2
    tokens_per_step = config.train.batch_size * config.data.sequence_length
    parameters = 12 * config.model.num_steps * int(width) ** 2
    config.train.total_steps = _TOKENS_PER_PARAMETER * parameters // tokens_per_step
    config.train.eval_batch_size = 64
    config.train.eval_batches = 32
    config.train.eval_all_at_end = False
    config.train.log_every = 50
    config.train.eval_every = config.train.total_steps // 2
    config.train.checkpoint_every = min(500, config.train.total_steps // 2)
    config.train.velocity_penalty = 0.1
    config.optimizer.learning_rate = 4e-3
    config.optimizer.beta2 = 0.99
    config.optimizer.warmup_fraction = 0.05
    config.optimizer.weight_decay = 0.5 if model in default.ODES else 0.1
    return default.set_variant(config, model)
