"""`config.model`: the model, the kernels that compute it, what its backward pass stores."""

from dataclasses import dataclass
from typing import Annotated

from t5x_diffeq.runtime.keys.key import (
    BelowOne,
    Count,
    Entries,
    Positive,
    Section,
    Size,
    SizeOrNone,
    SolverSteps,
    Switch,
    Texts,
    key,
    one_of,
)
from t5x_diffeq.runtime.keys.values import (
    KERNELS,
    PLUGIN,
    REMATS,
    SCHEMES,
    TIME_BASES,
    VOCABULARY,
    Values,
)

_Dtype = Annotated[str, one_of("float32", "bfloat16")]
_Activation = Annotated[str | None, Values(str, choices=("gelu", "relu", "silu"), optional=True)]


@dataclass(frozen=True)
class ModelKeys(Section):
    """`config.model`: the model, the kernels that compute it, what its backward pass stores."""

    section = "model"
    architecture: Annotated[str, one_of("gpt", "llama")] = key(
        "gpt", "gpt: LayerNorm, GELU, biases, learned positions | llama"
    )
    block: Annotated[str | None, Values(str, choices=(PLUGIN,), optional=True)] = key(
        None,
        """f and g of a step; None: the architecture's own | the importable name of another block,
        "package.module:Name" or "package.module:Name(size=4)" (t5x_diffeq/blocks/README.md);
        architecture still sets embeddings and head""",
    )
    weights: Annotated[str, one_of("time_dependent", "per_layer", "shared")] = key(
        "time_dependent", "W(t): time_dependent | per_layer (a baseline) | shared", finetune=True
    )
    scheme: Annotated[str, one_of(*SCHEMES, PLUGIN)] = key(
        "euler",
        """euler | lie_trotter | strang | midpoint | heun | rk4, or "package.module:name", the
        importable name of an `ode.solvers.Scheme`""",
        finetune=True,
    )
    step_size: Annotated[str, one_of("1/N", "c/N", "1")] = key(
        "1/N",
        """dt | "1/N": an ODE on [0, 1] | "4/N", or another number: its field is so many times as
        large | "1": the classical residual network""",
    )
    num_steps: SolverSteps = key(
        12, "N, the number of solver steps; of layers for a baseline", finetune=True
    )
    embed_dim: Size = key(256, "width of the state")
    num_heads: Size = key(4, "query heads")
    num_kv_heads: SizeOrNone = key(None, "key and value heads; None: as many as query heads")
    head_dim: SizeOrNone = key(None, "width of a head; None: embed_dim / num_heads")
    mlp_dim: Size = key(1024, "width inside the MLP")
    activation: _Activation = key(
        None,
        """of the MLP; gpt: gelu (None; as in the official code) | relu (as in the paper's text);
        llama, whose MLP is gated: silu (None) | gelu""",
    )
    time_embed_dim: Size = key(48, "T, width of each time embedding")
    attention_time_embed_dim: SizeOrNone = key(
        None,
        "T of the layers that are named attention, with the norm before them; None: time_embed_dim",
    )
    time_basis: Annotated[str, one_of(*TIME_BASES)] = key(
        "sinusoids",
        """what a time embedding reads: sinusoids of t, through two linears | K functions, of which
        e(t) is a linear function: legendre:K (legendre:1 is constant in t) | table:K (e itself at
        t = 1/K, 2/K, ..., 1, straight between) (t5x_diffeq/ode/time_features.py)""",
    )
    num_frequencies: Size = key(64, "S, frequencies of the sinusoids")
    time_scale: Positive = key(
        1000.0, "factor on t in the sinusoids; t itself is a feature whatever it is"
    )
    time_embedding: Annotated[str, one_of("separate", "common")] = key(
        "separate", "one for each linear and norm | common: one for all"
    )
    init: Annotated[str, one_of("paper", "invariant")] = key(
        "invariant", "scales of the hypernetwork | paper; t5x_diffeq/ode/hyper_init.py"
    )
    norm_eps: Positive = key(1e-5, "epsilon of the block's norms")
    final_norm_eps: Positive = key(1e-5, "epsilon of the norm before the logits")
    norm_shift: Switch = key(False, "llama: whether block norms have a shift (gpt's always do)")
    mlp_input: Annotated[str, one_of("state", "attention_norm")] = key(
        "state",
        """what the MLP's norm reads | attention_norm: the MLP reads the attention's normalised
        input""",
    )
    norm_position: Annotated[str, one_of("before", "after")] = key(
        "before", "y + f(norm(y)) | after: y + norm(f(y)), as in OLMo 2"
    )
    qkv_bias: Switch = key(False, "llama: whether q, k and v have biases (gpt's always do)")
    qk_norm: Annotated[str, one_of("none", "head", "projection")] = key(
        "none",
        """RMSNorm of q and k before they are rotated | head: of each head, as in Qwen3 |
        projection: of all heads together, as in OLMo 2""",
    )
    rope_theta: Annotated[float, Values(float, 1, open="(]")] = key(
        10000.0, "llama: base of the rotary frequencies, base^(-2i / head_dim)", finetune="if set"
    )
    rope_scaling: Entries = key(
        (),
        """llama: how rotary frequencies are stretched for long sequences: (): not at all |
        ("linear", factor) | ("llama3", factor, low_freq_factor, high_freq_factor, original_length)
        | ("yarn", factor, beta_fast, beta_slow, original_length, attention_factor)""",
        finetune="if set",
    )
    tied_head: Switch = key(
        False, "llama: whether the head is the embedding table (gpt's always is)"
    )
    embedding_scale: Positive = key(
        1.0, "factor on the token embeddings; Gemma has sqrt(embed_dim)"
    )
    position_scale: Positive = key(
        1.0,
        """gpt: factor on the position embeddings. With both factors at 8, the loss depends little
        on the number of solver steps (launch/reproduce/depth.md)""",
    )
    dropout_rate: BelowOne = key(
        0.0, "on embeddings and on the output of attention and MLP", branch=True, finetune="if set"
    )
    adapter_rank: Count = key(
        0, "rank of the LoRA branches of per_layer kernels; 0: no branches", finetune=True
    )
    adapter_alpha: Positive = key(16.0, "a branch is scaled by alpha / rank", finetune=True)
    adapter_kernels: Texts = key(
        (),
        """the linears that have a branch: qkv (gpt); query, key, value (llama); output, up, gate
        (llama), down; (): all of them""",
        finetune=True,
    )
    vocab_size: Annotated[int | None, Values(int, 1, VOCABULARY, optional=True)] = key(
        None, "None: the tokenizer's; a number must equal it"
    )
    dtype: _Dtype = key(
        "float32",
        "of the computation: float32 | bfloat16; parameters are float32",
        finetune="if set",
    )
    state_dtype: _Dtype = key(
        "float32",
        """of the state y and the sum y + dt f | bfloat16, only with model.dtype=bfloat16: its 8
        significant bits round most of a small increment dt f away""",
        finetune=True,
    )
    attention: Annotated[str, one_of("auto", *KERNELS, "splash:k")] = key(
        "auto",
        """kernel: auto (the platform's own) | xla | cudnn or triton (GPU) | splash (TPU);
        splash:512 also sets the size of its blocks""",
        branch=True,
        finetune="if set",
    )
    remat: Annotated[str, one_of(*REMATS, "keep:names")] = key(
        "full",
        """what the backward pass recomputes instead of storing it: none: nothing; dots: everything
        except matrix products; full: each step, from one state per step
        (launch/reproduce/README.md says why there is no online checkpointing);
        keep:qkv,attention,mlp: each step except the named values, which are the queries, keys and
        values; the attention's output; the input of the MLP's activation""",
        branch=True,
        finetune="if set",
    )
    scan_unroll: SolverSteps = key(
        1,
        """solver steps, up to num_steps, per iteration of the compiled loop: with more, the
        compiler can overlap one step's communication with the next one's computation, and takes
        longer""",
        resume=True,
        finetune="if set",
    )
    pipeline_microbatches: SizeOrNone = key(
        None,
        """M: on a mesh with stages, the parts into which a batch is cut, a multiple of mesh.stage;
        None: as many as stages. A pass takes (M + stages - 1) / M times as long as its work""",
        resume=True,
    )
