"""`config.model`: the model, the kernels that compute it, what its backward pass stores."""

from dataclasses import dataclass
from typing import Annotated

from t5x_diffeq.config.keys import values
from t5x_diffeq.config.keys.values import Section, Values, key, one_of, reads_as_data

_Dtype = Annotated[str, one_of("float32", "bfloat16")]
_Activation = Annotated[str | None, Values(str, choices=("gelu", "relu", "silu"), optional=True)]


@dataclass(frozen=True)
class ModelKeys(Section):
    """`config.model`: the model, the kernels that compute it, what its backward pass stores."""

    section = "model"
    architecture: Annotated[str, one_of("gpt", "llama")] = key("gpt")
    """`gpt`: LayerNorm, GELU, biases, learned positions. `llama`: RMSNorm, SwiGLU, rotary
    positions"""
    block: Annotated[str | None, Values(str, choices=(values.PLUGIN,), optional=True)] = key(None)
    """the importable name of your own block, such as `package.module:Name` or
    `package.module:Name(size=4)` ([Extending](extending.md)). `None`: the block of
    `model.architecture`, which sets embeddings and head in any case"""
    weights: Annotated[str, one_of(*values.WEIGHTS, values.PLUGIN)] = key(
        "time_dependent", finetune=True
    )
    """`time_dependent`: W(t) = W0 + P e(t). `per_layer`: each step has its own weights, as in GPT
    and Llama (the baseline). `shared`: one set of weights for all steps. Otherwise the importable
    name of an `ode.weight_source.WeightSource`, such as `package.module:Name` or
    `package.module:Name(rank=4)` ([Extending](extending.md))"""
    scheme: Annotated[str, one_of(*values.SCHEMES, values.PLUGIN)] = key("euler", finetune=True)
    """the solver: `euler`, `lie_trotter` (attention, then MLP: the classical residual block),
    `strang` (MacaronNet), `midpoint`, `heun` or `rk4`. Otherwise the importable name of an
    `ode.solvers.Scheme`, such as `package.module:name` ([Extending](extending.md))"""
    step_size: Annotated[str, one_of("1/N", "c/N", "1")] = key("1/N")
    """dt. `1/N`: an ODE on [0, 1]. `c/N`, such as `4/N`: the same with a field that is c times as
    large. `1`: the classical residual network"""
    num_steps: values.SolverSteps = key(12, finetune=True)
    """N, the number of solver steps, or of layers of a baseline"""
    embed_dim: values.Size = key(256)
    """width of the state"""
    num_heads: values.Size = key(4)
    """number of query heads"""
    num_kv_heads: values.SizeOrNone = key(None)
    """number of key and value heads. `None`: as many as query heads"""
    head_dim: values.SizeOrNone = key(None)
    """width of a head. `None`: `embed_dim / num_heads`"""
    mlp_dim: values.Size = key(1024)
    """width inside the MLP"""
    activation: _Activation = key(None)
    """activation of the MLP. For `gpt`: `gelu` (`None`; as in the paper's code) or `relu` (as in
    its text). For `llama`, whose MLP is gated: `silu` (`None`) or `gelu`"""
    time_embed_dim: values.Size = key(48)
    """T, the width of each time embedding e(t)"""
    attention_time_embed_dim: values.SizeOrNone = key(None)
    """T of the layers named `attention`, and of the norm before them. `None`:
    `model.time_embed_dim`"""
    time_basis: Annotated[str, one_of(*values.TIME_BASES, values.PLUGIN)] = key("sinusoids")
    """what e(t) is made of. `sinusoids`: sinusoids of t through two linear layers, as in the paper.
    `legendre:K`: a linear function of K Legendre polynomials (`legendre:1` is constant in t).
    `table:K`: a table of its values at t = 1/K, 2/K, ..., 1, with straight lines between them.
    Otherwise the importable name of an `ode.time_basis.TimeBasis`, such as
    `package.module:Name(9)`"""
    num_frequencies: values.Size = key(64)
    """S, the number of frequencies of the sinusoids"""
    time_scale: values.Positive = key(1000.0)
    """factor on t inside the sinusoids. They have t itself as another feature, without this
    factor"""
    time_embedding: Annotated[str, one_of("separate", "common")] = key("separate")
    """`separate`: each linear and norm has a time embedding of its own. `common`: one for all"""
    init: Annotated[str, one_of("paper", "invariant")] = key("invariant")
    """how the hypernetwork is initialised, and its updates scaled. `invariant`: so that one
    learning rate suits every T. `paper`: as in the paper's code"""
    norm_eps: values.Positive = key(1e-5)
    """epsilon of the block's norms"""
    final_norm_eps: values.Positive = key(1e-5)
    """epsilon of the norm before the logits"""
    norm_shift: values.Switch = key(False)
    """for `llama`: whether the block's norms have a shift. Those of `gpt` always have one"""
    mlp_input: Annotated[str, one_of("state", "attention_norm")] = key("state")
    """what the MLP's norm reads. `state`: the state. `attention_norm`: the attention's normalised
    input, as in the paper's code of Llama"""
    norm_position: Annotated[str, one_of("before", "after")] = key("before")
    """`before`: y + f(norm(y)). `after`: y + norm(f(y)), as in OLMo 2"""
    qkv_bias: values.Switch = key(False)
    """for `llama`: whether queries, keys and values have biases. Those of `gpt` always have them"""
    qk_norm: Annotated[str, one_of("none", "head", "projection")] = key("none")
    """RMSNorm of queries and keys, before they are rotated. `none`: no norm. `head`: over each
    head, as in Qwen3. `projection`: over all heads together, as in OLMo 2"""
    rope_theta: Annotated[float, Values(float, 1, open="(]")] = key(10000.0, finetune="if set")
    """for `llama`: the base of the rotary frequencies, base^(-2i / head_dim)"""
    rope_scaling: values.Entries = key((), finetune="if set", asks=reads_as_data)
    """for `llama`: how rotary frequencies are stretched for long sequences. `()`: not at all.
    Otherwise `("linear", factor)`, `("llama3", factor, low_freq_factor, high_freq_factor,
    original_length)` or `("yarn", factor, beta_fast, beta_slow, original_length,
    attention_factor)`"""
    tied_head: values.Switch = key(False)
    """for `llama`: whether the head is the embedding table. That of `gpt` always is"""
    embedding_scale: values.Positive = key(1.0)
    """factor on the token embeddings. Gemma's is sqrt(embed_dim)"""
    position_scale: values.Positive = key(1.0)
    """for `gpt`: factor on the position embeddings. With this factor and `model.embedding_scale` at
    8, the loss depends little on the number of solver steps
    ([Changing the number of steps](depth.md))"""
    dropout_rate: values.BelowOne = key(0.0, branch=True, finetune="if set")
    """dropout on the embeddings and on the outputs of attention and MLP"""
    adapter_rank: values.Count = key(0, finetune=True)
    """rank of the LoRA branches of `per_layer` kernels. `0`: no branches"""
    adapter_alpha: values.Positive = key(16.0, finetune=True)
    """a LoRA branch is scaled by alpha / rank"""
    adapter_kernels: values.TupleOfTexts = key((), finetune=True, asks=reads_as_data)
    """the linears that have a LoRA branch: `qkv` (gpt); `query`, `key`, `value` (llama); `output`,
    `up`, `gate` (llama), `down`. `()`: all of them"""
    vocab_size: Annotated[int | None, Values(int, 1, values.VOCABULARY, optional=True)] = key(None)
    """`None`: the tokenizer's. A number must equal the tokenizer's"""
    embedding_rows: Annotated[int | None, Values(int, 1, values.VOCABULARY, optional=True)] = key(
        None
    )
    """rows of the token embedding and of the head. `None`: one for each token. `convert` sets it if
    a folder has more rows than its tokenizer has tokens; they are kept, and never predicted"""
    dtype: _Dtype = key("float32", finetune="if set")
    """data type of the computation. Parameters are always float32"""
    products: Annotated[str, one_of("dtype", "fp8")] = key("dtype", finetune="if set")
    """the precision of the products in the blocks' linears. `dtype`: `model.dtype`. `fp8`, which
    needs `model.dtype=bfloat16`: operands of 8 bits (e4m3, gradients e5m2), each array scaled by
    its largest entry. It pays on GPUs from the H100 on ([a step in fp8](lab/h100.md#fp8))"""
    state_dtype: _Dtype = key("float32", finetune=True)
    """data type of the state y and of the sum y + dt f. `bfloat16` needs `model.dtype=bfloat16`,
    and its 8 significant bits round away most of a small increment dt f"""
    attention: Annotated[str, one_of("auto", *values.KERNELS, "splash:k")] = key(
        "auto", branch=True, finetune=True
    )
    """kernel of the attention. `auto`: cuDNN's or Triton's on GPUs, splash attention on TPUs, and
    XLA's on other devices or if the shapes allow no other. `xla`: any device. `cudnn`, `triton`:
    GPUs. `splash`: TPUs; `splash:512` also sets the size of its blocks. A trained run can be used
    on any device: what reads it takes `auto` in place of these three"""
    remat: Annotated[str, one_of(*values.REMATS, "keep:names")] = key(
        "full", branch=True, finetune="if set"
    )
    """what the backward pass computes again instead of storing it. `none`: nothing. `dots`:
    everything except matrix products. `full`: each solver step, from one state per step.
    `keep:qkv,attention,mlp`: each step except the named values, which are the queries, keys and
    values; the output of the attention; the input of the MLP's activation. With
    `model.products=fp8`, `fp8` keeps the rounded inputs of products, too"""
    scan_unroll: values.SolverStepsOrNone = key(None, resume=True, finetune="if set")
    """solver steps per iteration of the compiled loop, at most `num_steps`. With more steps, less
    is copied, the communication of one step can overlap with the computation of the next, and
    compilation takes longer. `None`: on GPUs, unless `model.remat=full`, all of them (if there are
    more than 32, equal parts of at most 32); otherwise 1"""
