"""The published models of each family, as `config.json` and shapes: what `convert` accepts."""

from math import prod

import pytest

from configs import default
from t5x_diffeq.config.config import Config
from t5x_diffeq.data.tokenizer import Tokenizer
from t5x_diffeq.hf.config_json import folder_family
from t5x_diffeq.hf.from_pretrained import check_vocabulary, with_model
from t5x_diffeq.hf.layouts import outer_leaves
from t5x_diffeq.model.config import ModelConfig
from t5x_diffeq.model.sub_fields import declared_leaves

ROPE3 = {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
# What the files of a family say besides sizes, with the keys of older versions of the library.
COMMON = {
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.02,
    "rope_scaling": None,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.40.1",
    "use_cache": True,
}
LLAMA = {
    **COMMON,
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "hidden_act": "silu",
    "mlp_bias": False,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
LLAMA3 = {**LLAMA, "rope_theta": 500000.0, "eos_token_id": [128001, 128008, 128009]}
LLAMA31 = {**LLAMA3, "rope_scaling": ROPE3, "max_position_embeddings": 131072}
SMOLLM = {
    **LLAMA,
    "is_llama_config": True,
    "rope_interleaved": False,
    "rope_theta": 100000,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}},
}
MISTRAL = {
    **COMMON,
    "model_type": "mistral",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "max_position_embeddings": 32768,
}
QWEN2 = {
    **COMMON,
    "model_type": "qwen2",
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "max_window_layers": 21,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "use_mrope": False,
    "use_sliding_window": False,
}
QWEN3 = {
    **QWEN2,
    "model_type": "qwen3",
    "attention_bias": False,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "sliding_window": None,
}
OLMO2 = {
    **LLAMA,
    "model_type": "olmo2",
    "max_position_embeddings": 4096,
    "pad_token_id": 100277,
    "rms_norm_eps": 1e-6,
    "rope_theta": 500000,
}
GEMMA = {
    **COMMON,
    "model_type": "gemma",
    "attention_bias": False,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": None,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
}
GPT2 = {
    "model_type": "gpt2",
    "activation_function": "gelu_new",
    "attn_pdrop": 0.1,
    "bos_token_id": 50256,
    "embd_pdrop": 0.1,
    "eos_token_id": 50256,
    "layer_norm_epsilon": 1e-5,
    "n_ctx": 1024,
    "n_positions": 1024,
    "n_special": 0,
    "output_past": True,
    "predict_special_tokens": True,
    "resid_pdrop": 0.1,
    "summary_type": "cls_index",
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
    "vocab_size": 50257,
}
SIZES = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "vocab_size",
)


def sized(family, *sizes, **more):
    return {**family, **dict(zip(SIZES, sizes, strict=True)), **more}


def gpt2(width, layers, heads, **more):
    return {**GPT2, "n_embd": width, "n_layer": layers, "n_head": heads, **more}


TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
LLAMA1 = {"max_sequence_length": 2048, "rms_norm_eps": 1e-6}
LLAMA2 = {"max_position_embeddings": 4096}
NEMO = {"head_dim": 128, "max_position_embeddings": 1024000}
# Its `config.json`, the number of tokens of its tokenizer, and of its parameters.
PUBLISHED = {
    "gpt2": (gpt2(768, 12, 12), 50257, 124_439_808),
    "gpt2-xl": (gpt2(1600, 48, 25), 50257, 1_557_611_200),
    "distilgpt2": (gpt2(768, 6, 12, _num_labels=1), 50257, 81_912_576),
    "llama-7b": (sized(LLAMA, 4096, 32, 32, 32, 11008, 32000, **LLAMA1), 32000, 6_738_415_616),
    "Llama-2-70b": (sized(LLAMA, 8192, 80, 64, 8, 28672, 32000, **LLAMA2), 32000, 68_976_648_192),
    "Llama-3-8B": (sized(LLAMA3, 4096, 32, 32, 8, 14336, 128256), 128256, 8_030_261_248),
    "Llama-3.1-405B": (sized(LLAMA31, 16384, 126, 128, 8, 53248, 128256), 128256, 405_853_388_800),
    "Llama-3.2-1B": (
        sized(LLAMA31, 2048, 16, 32, 8, 8192, 128256, head_dim=64, **TIED),
        128256,
        1_235_814_400,
    ),
    "Llama-3.2-3B": (
        sized(LLAMA31, 3072, 28, 24, 8, 8192, 128256, head_dim=128, **TIED),
        128256,
        3_212_749_824,
    ),
    "Llama-3.3-70B": (sized(LLAMA31, 8192, 80, 64, 8, 28672, 128256), 128256, 70_553_706_496),
    "TinyLlama-1.1B": (sized(LLAMA, 2048, 22, 32, 4, 5632, 32000), 32000, 1_100_048_384),
    "SmolLM2-135M": (sized(SMOLLM, 576, 30, 9, 3, 1536, 49152), 49152, 134_515_008),
    "SmolLM2-1.7B": (sized(SMOLLM, 2048, 24, 32, 32, 8192, 49152), 49152, 1_711_376_384),
    "Mistral-7B-v0.3": (sized(MISTRAL, 4096, 32, 32, 8, 14336, 32768), 32768, 7_248_023_552),
    "Mistral-Nemo": (
        sized(MISTRAL, 5120, 40, 32, 8, 14336, 131072, **NEMO),
        131072,
        12_247_782_400,
    ),
    "Mistral-Large": (sized(MISTRAL, 12288, 88, 96, 8, 28672, 32768), 32768, 122_610_069_504),
    "Qwen2-0.5B": (sized(QWEN2, 896, 24, 14, 2, 4864, 151936, **TIED), 151646, 494_032_768),
    "Qwen2.5-3B": (sized(QWEN2, 2048, 36, 16, 2, 11008, 151936, **TIED), 151665, 3_085_938_688),
    "Qwen2.5-7B": (sized(QWEN2, 3584, 28, 28, 4, 18944, 152064, **UNTIED), 151665, 7_615_616_512),
    "Qwen2.5-72B": (sized(QWEN2, 8192, 80, 64, 8, 29568, 152064), 151665, 72_706_203_648),
    "Qwen3-0.6B": (sized(QWEN3, 1024, 28, 16, 8, 3072, 151936, **TIED), 151669, 596_049_920),
    "Qwen3-8B": (sized(QWEN3, 4096, 36, 32, 8, 12288, 151936), 151669, 8_190_735_360),
    "Qwen3-32B": (sized(QWEN3, 5120, 64, 64, 8, 25600, 151936), 151669, 32_762_123_264),
    "OLMo-2-1B": (sized(OLMO2, 2048, 16, 16, 16, 8192, 100352), 100278, 1_484_916_736),
    "OLMo-2-32B": (sized(OLMO2, 5120, 64, 40, 8, 27648, 100352), 100278, 32_234_279_936),
    "gemma-2b": (sized(GEMMA, 2048, 18, 8, 1, 16384, 256000), 256000, 2_506_172_416),
    "gemma-7b": (sized(GEMMA, 3072, 28, 16, 16, 24576, 256000), 256000, 8_537_680_896),
}


class TokenizerOf(Tokenizer):
    """A tokenizer that is a number of tokens."""

    _encode = _decode = None

    def __init__(self, tokens):
        self.vocab_size = tokens


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes(name):
    """Every check of the folder but those of its tensors' content, and the parameters' number."""
    config_json, tokens, parameters = PUBLISHED[name]
    config, tables = with_model(Config.of(default.get_config()), config_json, None)
    rows_without = check_vocabulary(TokenizerOf(tokens), tables)
    assert rows_without == config_json["vocab_size"] - tokens
    config = config.with_values({"model.embedding_rows": tables.tokens})
    model = ModelConfig.of(config.model, tokens, config.data.sequence_length)
    found = sum(leaf.value.size for leaf in declared_leaves(model).values()) * model.num_steps
    padding = model.padded_vocab_rows - model.vocab_rows
    for path, (*rest, width) in outer_leaves(model).items():
        found += prod(rest) * width
        if path in (("head",), ("token_embedding", "table")):
            found -= padding * model.embed_dim
    assert found == parameters
    layout = folder_family(config_json)[1].layout
    assert declared_leaves(model).keys() <= layout.leaves.keys()
