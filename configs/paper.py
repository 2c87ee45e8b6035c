"""What the paper's configs have in common (sections 6.1 and C): models in bfloat16, their training.

Sizes that a config does not name are the paper's: GPT reads 1024 tokens with a vocabulary of 50257,
Llama 2048 with 32000. A tokenizer of this size is trained on the data, so losses per token can't be
compared with the paper's. `--config.data.tokenizer=PATH` takes GPT-2's tokenizer.json or
Llama's sentencepiece model, as `launch/reproduce/` does (docs/results.md says where to get them).
"""

from ml_collections import ConfigDict

from configs import default


def training() -> ConfigDict:
    """40k steps of 256 sequences, 3e-4, warm-up 1%, cosine to a tenth, clip 1."""
    config = default.get_config()
    config.model.dtype = "bfloat16"
    config.model.init = "paper"
    config.data.source = "text_files"
    config.data.cross_documents = True
    config.train.total_steps = 40_000
    config.train.batch_size = 256
    config.train.eval_batch_size = 256
    config.train.eval_batches = 64
    config.train.log_every = 50
    config.train.eval_every = 500
    config.train.checkpoint_every = 1000
    config.optimizer.learning_rate = 3e-4
    config.optimizer.weight_decay = 0.1
    return config


def gpt(num_steps: int, embed_dim: int, num_heads: int, time_embed_dim: int) -> ConfigDict:
    """GPT-2's shapes with dropout 0.1; S = 128."""
    config = training()
    config.model.num_steps = num_steps
    config.model.embed_dim = embed_dim
    config.model.num_heads = num_heads
    config.model.mlp_dim = 4 * embed_dim
    config.model.time_embed_dim = time_embed_dim
    config.model.num_frequencies = 128
    config.model.dropout_rate = 0.1
    config.data.tokenizer_vocab_size = 50257
    config.data.sequence_length = 1024
    return config


def set_variant(config: ConfigDict, variant: str) -> ConfigDict:
    """As `default.set_variant`; in the ODE, only the embeddings decay (appendix C)."""
    default.set_variant(config, variant)
    if variant == "ode":
        config.optimizer.decay = "embeddings"
    return config
