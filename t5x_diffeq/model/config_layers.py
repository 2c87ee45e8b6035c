"""The layers that a config describes: its norm, its attention, its MLP."""

from math import sqrt
from typing import Any

from t5x_diffeq.model.config import ModelConfig
from t5x_diffeq.model.layers.attention import Attention
from t5x_diffeq.model.layers.mlp import MLP
from t5x_diffeq.model.layers.norm import Norm


def norm_of(config: ModelConfig) -> Norm:
    """The norm of a sub-field, before or after it."""
    gpt = config.architecture == "gpt"
    return Norm(
        centred=gpt,
        use_shift=gpt or config.norm_shift,
        epsilon=config.norm_eps,
        writes_residual=config.norm_position == "after",
        dtype=config.compute_dtype,
        unrolled=_is_unrolled(config),
    )


def attention_of(config: ModelConfig) -> Attention:
    """Causal attention."""
    gpt = config.architecture == "gpt"
    return Attention(
        config.embed_dim,
        config.head_width,
        config.num_heads,
        config.kv_heads,
        fused=gpt,
        qkv_bias=gpt or config.qkv_bias,
        qk_norm=config.qk_norm,
        norm_eps=config.norm_eps,
        rotary=not gpt,
        rope_theta=config.rope_theta,
        rope_scaling=config.rope_scaling,
        kernel=config.attention,
        **_common(config),
    )


def mlp_of(config: ModelConfig) -> MLP:
    """The MLP."""
    gated = config.architecture == "llama"
    return MLP(
        config.embed_dim,
        config.mlp_dim,
        config.mlp_activation,
        gated=gated,
        unrolled=_is_unrolled(config),
        **_common(config),
    )


def output_std(config: ModelConfig) -> float:
    """Standard deviation at initialisation of kernels that write to the residual stream.

    N residual additions with step size 1 make the stream grow, so their kernels begin smaller, as
    in GPT-2 (Radford et al. 2019); additions with step size 1/N do not.
    """
    return 0.02 / sqrt(2 * config.num_steps) if config.step_size == "1" else 0.02


def _is_unrolled(config: ModelConfig) -> bool:
    return (config.scan_unroll or 1) > 1


def _common(config: ModelConfig) -> dict[str, Any]:
    fp8 = config.products == "fp8"
    return {
        "use_bias": config.architecture == "gpt",
        "writes_residual": config.norm_position == "before",
        "output_std": output_std(config),
        "dtype": config.compute_dtype,
        "fp8": fp8,
        "merge_tokens": config.merge_tokens or fp8,  # `fp8_tensordot` takes merged tokens only
    }
