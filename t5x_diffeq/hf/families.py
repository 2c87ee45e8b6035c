"""A table of the model classes of transformers that per-layer models are exported to."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isclose, sqrt
from typing import Any

from t5x_diffeq.hf.layouts import GEMMA, GPT2, LLAMA, OLMO2, QWEN2, QWEN3, Layout
from t5x_diffeq.model.config import ModelConfig
from t5x_diffeq.model.ode.solvers import find_scheme

# The keys of `config.json` by ours. `length` is `data.sequence_length`.
_LLAMA_KEYS = {
    "num_steps": "num_hidden_layers",
    "embed_dim": "hidden_size",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "mlp_dim": "intermediate_size",
    "activation": "hidden_act",
    "norm_eps": "rms_norm_eps",
    "length": "max_position_embeddings",
}
_GPT2_KEYS = {
    "num_steps": "n_layer",
    "embed_dim": "n_embd",
    "num_heads": "n_head",
    "mlp_dim": "n_inner",
    "activation": "activation_function",
    "norm_eps": "layer_norm_epsilon",
    "length": "n_positions",
}
_GELU = {"gelu_pytorch_tanh": "gelu", "gelu_new": "gelu"}
_LLAMA_ACTIVATIONS = {"silu": "silu", "swish": "silu", **_GELU}


@dataclass(frozen=True)
class Family:
    """A model class of transformers."""

    model_class: str
    layout: Layout  # the names of its tensors
    keys: Mapping[str, str] = field(default_factory=lambda: _LLAMA_KEYS)
    # Our names of the MLP's activation, by the library's names; export writes the first.
    activations: Mapping[str, str] = field(default_factory=lambda: _LLAMA_ACTIVATIONS)
    architecture: str = "llama"  # our block
    features: Mapping[str, Any] = field(default_factory=dict)  # our keys that have fixed values
    scaled_embedding: bool = False  # by the square root of its width
    any_head_dim: bool = True  # whether the heads' widths may sum to another width than `embed_dim`
    rotary: bool = True
    tied_head: bool | None = False  # the default of `config.json`; None: the head is always tied
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of keys that `config.json` lacks
    # Keys that change the computation, with the supported values; the first is the default.
    only: Mapping[str, tuple] = field(default_factory=dict)

    def embedding_scale(self, embed_dim: int) -> float:
        """The factor on the embedding of this width."""
        return sqrt(embed_dim) if self.scaled_embedding else 1.0

    def fits(self, config: ModelConfig) -> bool:
        """Whether the block, embedding and head of a model are this class's."""
        shifts = config.architecture == "llama" and config.norm_shift
        features = {**PLAIN, **self.features}
        return (
            config.architecture == self.architecture
            and not shifts
            and all(getattr(config, key) == value for key, value in features.items())
            and isclose(config.embedding_scale, self.embedding_scale(config.embed_dim))
            and (self.any_head_dim or config.num_heads * config.head_width == config.embed_dim)
            and config.mlp_activation in self.activations.values()
        )


# Our keys of a plain block.
PLAIN = {"qkv_bias": False, "qk_norm": "none", "norm_position": "before"}
_NO_BIAS = {"attention_bias": (False,), "mlp_bias": (False,)}
_LONG = {"length": 32768, "num_kv_heads": 32}

# Keys of `config.json` that don't change what a model computes: who wrote it, how it is trained,
# how tokens are drawn. Every class has them (transformers 4.53, 5.24, and files of older versions).
HARMLESS = {
    *("model_type", "architectures", "transformers_version", "dtype", "torch_dtype"),
    *("_name_or_path", "name_or_path", "_commit_hash", "unsloth_version", "unsloth_fixed"),
    *("_attn_implementation", "attn_implementation", "_attn_implementation_autoset"),
    *("use_cache", "pretraining_tp", "n_ctx", "reorder_and_upcast_attn", "use_bfloat16"),
    *("initializer_range", "attention_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop"),
    *("classifier_dropout", "hidden_dropout", "gradient_checkpointing", "finetuning_task"),
    *("summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels"),
    *("summary_first_dropout", "problem_type", "num_labels", "id2label", "label2id"),
    *("return_dict", "return_dict_in_generate", "output_hidden_states", "output_attentions"),
    *("output_scores", "torchscript", "tf_legacy_loss", "xla_device", "tokenizer_class"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "sep_token_id"),
    *("decoder_start_token_id", "forced_bos_token_id", "forced_eos_token_id", "prefix"),
    *("task_specific_params", "max_length", "min_length", "do_sample", "early_stopping"),
    *("num_beams", "num_beam_groups", "diversity_penalty", "temperature", "top_k", "top_p"),
    *("typical_p", "repetition_penalty", "length_penalty", "no_repeat_ngram_size"),
    *("encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences"),
    *("remove_invalid_values", "exponential_decay_length_penalty", "suppress_tokens"),
    *("begin_suppress_tokens", "is_llama_config", "transformers.js_config", "max_sequence_length"),
    *("predict_special_tokens", "output_past", "_num_labels", "_flash_attn_2_enabled"),
}
# Keys of rotary positions and of windows of attention, which are checked elsewhere.
ROTARY_KEYS = {
    *("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "truncate"),
    *("mscale", "sliding_window", "use_sliding_window", "max_window_layers", "layer_types"),
}

# By `model_type`. A model is exported as the first class that it fits.
FAMILIES = {
    "gpt2": Family(
        "GPT2LMHeadModel",
        GPT2,
        _GPT2_KEYS,
        {"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "relu": "relu"},
        "gpt",
        any_head_dim=False,
        rotary=False,
        tied_head=None,
        defaults={"norm_eps": 1e-5},
        only={
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
            "add_cross_attention": (False,),
            "tie_word_embeddings": (True,),
        },
    ),
    "llama": Family(
        "LlamaForCausalLM",
        LLAMA,
        any_head_dim=False,
        defaults={"norm_eps": 1e-6, "length": 2048},
        only=_NO_BIAS,
    ),
    "mistral": Family(
        "MistralForCausalLM",
        LLAMA,
        defaults={"norm_eps": 1e-6, "length": 131072, "num_kv_heads": 8},
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        QWEN2,
        features={"qkv_bias": True},
        defaults={"norm_eps": 1e-6, **_LONG},
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        QWEN3,
        features={"qk_norm": "head"},
        defaults={"norm_eps": 1e-6, "head_dim": 128, **_LONG},
        only=_NO_BIAS,
    ),
    "olmo2": Family(
        "Olmo2ForCausalLM",
        OLMO2,
        features={"qk_norm": "projection", "norm_position": "after"},
        defaults={"norm_eps": 1e-5, "length": 2048},
        only=_NO_BIAS,
    ),
    "gemma": Family(
        "GemmaForCausalLM",
        GEMMA,
        # If a folder of this class says "gelu", the library, too, computes the tanh form.
        activations={"gelu_pytorch_tanh": "gelu", "gelu_new": "gelu", "gelu": "gelu"},
        scaled_embedding=True,
        tied_head=True,
        defaults={"norm_eps": 1e-6, "length": 8192, "num_kv_heads": 16, "head_dim": 256},
        only={
            **_NO_BIAS,
            "use_bidirectional_attention": (None, False),
            "hidden_activation": (None, "gelu_pytorch_tanh"),
        },
    ),
}


def family_of(config: ModelConfig) -> tuple[str, Family] | None:
    """The `model_type` and class that compute what a model does; None if there is none.

    A model can have a class only if its step is the classical residual block (Lie-Trotter, whose
    step size goes into the weights), and if all its norms have one epsilon.
    """
    sequential = find_scheme(config.scheme).layer == "sequential"
    if config.block or not sequential or config.mlp_input != "state":
        return None
    if config.norm_eps != config.final_norm_eps:
        return None
    return next((item for item in FAMILIES.items() if item[1].fits(config)), None)
