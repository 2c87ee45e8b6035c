"""A neural ODE transformer on its grid, in PyTorch, for transformers 4.53 or later.

    y <- y + f_n(y) + g_n(y)                          Euler: attention and MLP read the same state
    y <- y + f_n(y); y <- y + g_n(y)                  Lie-Trotter

for n = 1..N, with the weights W(t_n) of each step and the step size inside the last linear of
attention f and of MLP g. The state y is float32, also where the weights are loaded in 16 bits: its
steps are small, and would be rounded away. This file travels with the weights; it needs nothing of
t5x_diffeq:

    AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)

Licensed under Apache-2.0.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import DynamicCache, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.modeling_outputs import CausalLMOutputWithPast

# transformers 5.24 calls `cache` what earlier versions call `past_key_values`. The model takes both
# names, and its output has the name that the library's own outputs have.
OUTPUTS = CausalLMOutputWithPast.__dataclass_fields__
CACHE_NAME = "cache" if "cache" in OUTPUTS else "past_key_values"

DEFAULTS = {
    "architecture": "gpt",
    "parallel": True,
    "mlp_reads_attention_norm": False,
    "norm_shift": True,
    "norm_position": "before",
    "qkv_bias": True,
    "qk_norm": "none",
    "tied_head": True,
    "embedding_scale": 1.0,
    "rotary_frequencies": None,
    "rotary_factor": 1.0,
    "activation": "gelu",
    "norm_eps": 1e-5,
    "final_norm_eps": 1e-5,
    "vocab_size": 256,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 16,
    "use_cache": True,
}


class DiffEqConfig(PretrainedConfig):
    """Shapes, under the library's usual names, and what makes the model an ODE's.

    Attributes:
      architecture: "gpt" (LayerNorm, biases, learned positions) or "llama" (RMSNorm, a gated MLP,
        rotary positions, grouped queries).
      parallel: whether attention and MLP read the same state (Euler), or one after the other.
      mlp_reads_attention_norm: whether the MLP's norm reads the attention's norm, not the state.
      norm_shift: whether the norms of the steps have a shift.
      norm_position: "before" attention and MLP, or "after" them.
      qkv_bias: whether queries, keys and values have biases.
      qk_norm: of queries and keys: "none", "head" (of each head) or "projection" (of all together).
      tied_head: whether the head is the tokens' own vectors.
      embedding_scale: factor on the tokens' vectors.
      rotary_frequencies: radians per token of each pair of a head (llama).
      rotary_factor: factor on cosines and sines.
      activation: of the MLP, "gelu", "relu" (gpt) or "silu" (llama).
      norm_eps: epsilon of the norms of the steps.
      final_norm_eps: of the norm before the head.
    """

    model_type = "t5x_diffeq"
    keys_to_ignore_at_inference = ["past_key_values", "cache"]  # noqa: RUF012

    def __init__(self, **kwargs):
        for name, default in DEFAULTS.items():
            setattr(self, name, kwargs.pop(name, default))
        super().__init__(**kwargs)

    @property
    def gpt(self):
        """Whether the layers are GPT's, not Llama's."""
        return self.architecture == "gpt"


class Norm(nn.Module):
    """LayerNorm, or RMSNorm with or without a shift, in float32."""

    def __init__(self, width, centred, shift, eps):
        super().__init__()
        self.centred, self.eps = centred, eps
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if shift else None

    def forward(self, x: Tensor) -> Tensor:
        """Each vector of `x`, normalised."""
        y = x.float()
        if self.centred:
            y = y - y.mean(-1, keepdim=True)
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps) * self.weight.float()
        y = y if self.bias is None else y + self.bias.float()
        return y.to(self.weight.dtype)  # of the weights after it; the state's own may be wider


class Attention(nn.Module):
    """f without its norm; the step size is in `output`."""

    def __init__(self, config: DiffEqConfig, step: int):
        super().__init__()
        self.step, self.gpt, self.head_dim = step, config.gpt, config.head_dim
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        width, queries = config.hidden_size, config.num_attention_heads * config.head_dim
        keys, bias = self.kv_heads * self.head_dim, config.qkv_bias
        if self.gpt:
            self.qkv = nn.Linear(width, 3 * queries, bias=bias)
        else:
            self.query = nn.Linear(width, queries, bias=bias)
            self.key = nn.Linear(width, keys, bias=bias)
            self.value = nn.Linear(width, keys, bias=bias)
        self.output = nn.Linear(queries, width, bias=self.gpt)
        self.qk_norm, eps = config.qk_norm, config.norm_eps
        if self.qk_norm != "none":
            head = self.qk_norm == "head"
            self.query_norm = Norm(self.head_dim if head else queries, False, False, eps)
            self.key_norm = Norm(self.head_dim if head else keys, False, False, eps)

    def forward(self, x: Tensor, turn, mask: Tensor, cache: Cache | None) -> Tensor:
        """`[B, L, D]` to `[B, L, D]`.

        Args:
          x: the normalised state.
          turn: cosines and sines `[B, 1, L, G/2]` that turn queries and keys; None for gpt.
          mask: `[B, 1, L, K]`, true where a query sees a key.
          cache: of the keys and values of tokens before, or None.
        """
        parts = (
            self.qkv(x).chunk(3, -1) if self.gpt else (self.query(x), self.key(x), self.value(x))
        )
        q, k, v = parts
        if self.qk_norm == "projection":
            q, k = self.query_norm(q), self.key_norm(k)
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in (q, k, v))
        if self.qk_norm == "head":
            q, k = self.query_norm(q), self.key_norm(k)
        if turn is not None:
            q, k = rotate(q, *turn), rotate(k, *turn)
        if cache is not None:
            seen = mask.shape[-1]
            # A static cache of transformers 4 does not count its tokens, and must be told.
            places = torch.arange(seen - x.shape[1], seen, device=x.device)
            k, v = cache.update(k, v, self.step, {"cache_position": places})
            k, v = k[:, :, :seen], v[:, :, :seen]  # of a cache with room
        served = self.heads // self.kv_heads
        if served > 1:
            k, v = k.repeat_interleave(served, dim=1), v.repeat_interleave(served, dim=1)
        mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.output(mixed.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """g without its norm; the step size is in `down`."""

    def __init__(self, config: DiffEqConfig):
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        self.up = nn.Linear(width, inner, bias=config.gpt)
        self.gate = None if config.gpt else nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=config.gpt)
        self.activation = config.activation

    def forward(self, x: Tensor) -> Tensor:
        """`[B, L, D]` to `[B, L, D]`."""
        if self.gate is None:
            return self.down(self.activate(self.up(x)))
        return self.down(self.activate(self.gate(x)) * self.up(x))

    def activate(self, x: Tensor) -> Tensor:
        """The activation of each entry."""
        if self.activation == "gelu":
            return functional.gelu(x, approximate="tanh")
        return functional.relu(x) if self.activation == "relu" else functional.silu(x)


class Step(nn.Module):
    """One step of the scheme."""

    def __init__(self, config: DiffEqConfig, step: int):
        super().__init__()
        norm = (config.hidden_size, config.gpt, config.norm_shift, config.norm_eps)
        self.attention_norm, self.mlp_norm = Norm(*norm), Norm(*norm)
        self.attention, self.mlp = Attention(config, step), MLP(config)
        self.parallel = config.parallel
        self.mlp_reads_attention_norm = config.mlp_reads_attention_norm
        self.norms_last = config.norm_position == "after"

    def forward(self, y: Tensor, turn, mask: Tensor, cache: Cache | None) -> Tensor:
        """The state after the step."""
        f = self.f(y, turn, mask, cache)
        if self.parallel:
            return y + f + self.g(y)
        y = y + f
        return y + self.g(y)

    def f(self, y: Tensor, turn, mask: Tensor, cache: Cache | None) -> Tensor:
        """The attention's part."""
        if self.norms_last:
            narrow = y.to(self.attention_norm.weight.dtype)
            return self.attention_norm(self.attention(narrow, turn, mask, cache))
        return self.attention(self.attention_norm(y), turn, mask, cache)

    def g(self, y: Tensor) -> Tensor:
        """The MLP's part."""
        if self.norms_last:
            return self.mlp_norm(self.mlp(y.to(self.mlp_norm.weight.dtype)))
        x = self.attention_norm(y) if self.mlp_reads_attention_norm else y
        return self.mlp(self.mlp_norm(x))


class DiffEqForCausalLM(PreTrainedModel, GenerationMixin):
    """Embed, step N times, normalise, and compare with the vocabulary's vectors."""

    config_class = DiffEqConfig
    step_class = Step  # of another block, a subclass has its own
    supports_gradient_checkpointing = False
    _no_split_modules = ["Step"]  # noqa: RUF012
    _supports_sdpa = True
    _supports_cache_class = True

    def __init__(self, config: DiffEqConfig):
        super().__init__(config)
        width = config.hidden_size
        self.token_embedding = nn.Embedding(config.vocab_size, width)
        if config.gpt:
            self.position_embedding = nn.Embedding(config.max_position_embeddings, width)
        if not config.tied_head:
            self.head = nn.Linear(width, config.vocab_size, bias=False)
        steps = range(config.num_hidden_layers)
        self.steps = nn.ModuleList(self.step_class(config, n) for n in steps)
        self.final_norm = Norm(width, config.gpt, config.gpt, config.final_norm_eps)
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding:
        """The tokens' vectors."""
        return self.token_embedding

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        """Replaces them."""
        self.token_embedding = value

    def get_output_embeddings(self) -> nn.Linear | None:
        """The head, where it is not the tokens' own vectors."""
        return None if self.config.tied_head else self.head

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        return_dict: bool | None = None,
        cache: Cache | None = None,
        **kwargs,
    ) -> CausalLMOutputWithPast | tuple:
        """Logits of each token's successor, and the loss where `labels` are given.

        Args:
          input_ids: `[B, L]`, new tokens.
          attention_mask: `[B, tokens so far]`, 0 where there is padding.
          position_ids: `[B, L]`; None counts the tokens that are no padding.
          past_key_values: keys and values of the tokens before, until transformers 5.23.
          inputs_embeds: `[B, L, D]` instead of `input_ids`.
          labels: `[B, L]`, the tokens again; -100 does not count.
          use_cache: whether to return keys and values.
          logits_to_keep: of how many last tokens logits are wanted; 0: of all.
          return_dict: False returns a tuple.
          cache: the same, since transformers 5.24.
          kwargs: of the library; unused.
        """
        y = self.token_embedding(input_ids) if inputs_embeds is None else inputs_embeds
        cache = past_key_values if cache is None else cache
        if use_cache is None:
            use_cache = self.config.use_cache and labels is None
        if use_cache and cache is None:
            cache = DynamicCache()
        past = 0 if cache is None else int(cache.get_seq_length())
        if position_ids is None:
            position_ids = positions(attention_mask, past, y)
        turn = None
        y = y.to(torch.promote_types(y.dtype, torch.float32)) * self.config.embedding_scale
        if self.config.gpt:
            y = y + self.position_embedding(position_ids)
        else:
            turn = turning(position_ids, self.config)
        mask = causal_mask(attention_mask, past, y)
        for step in self.steps:
            y = step(y, turn, mask, cache)
        y = self.final_norm(y[:, -logits_to_keep:])
        vectors = self.token_embedding.weight if self.config.tied_head else self.head.weight
        logits = functional.linear(y, vectors)
        loss = None if labels is None else next_token_loss(logits, labels)
        kept = {CACHE_NAME: cache if use_cache else None}
        output = CausalLMOutputWithPast(loss=loss, logits=logits, **kept)
        return output.to_tuple() if return_dict is False else output


def positions(attention_mask: Tensor | None, past: int, y: Tensor) -> Tensor:
    """`[B, L]`: each token's place among those that are no padding."""
    B, L = y.shape[:2]
    if attention_mask is None or attention_mask.dim() != 2:
        return torch.arange(past, past + L, device=y.device).expand(B, L)
    return (attention_mask.long().cumsum(-1) - 1).clamp(min=0)[:, past : past + L]


def causal_mask(attention_mask: Tensor | None, past: int, y: Tensor) -> Tensor:
    """`[B, 1, L, past + L]`, true where a query sees a key; each sees itself, padding too."""
    B, L = y.shape[:2]
    if attention_mask is not None and attention_mask.dim() == 4:
        return attention_mask
    query = torch.arange(past, past + L, device=y.device)[:, None]
    key = torch.arange(past + L, device=y.device)
    seen = (key <= query).expand(B, 1, L, past + L)
    if attention_mask is None:
        return seen
    real = attention_mask[:, : past + L].bool()
    return (seen & real[:, None, None]) | (key == query)


def turning(position_ids: Tensor, config: DiffEqConfig) -> tuple[Tensor, Tensor]:
    """Cosines and sines `[B, 1, L, G/2]` of `position * frequency`, times the factor."""
    numbers = {"dtype": torch.float32, "device": position_ids.device}
    frequencies = torch.tensor(config.rotary_frequencies, **numbers)
    angles = position_ids[:, None, :, None].float() * frequencies
    return angles.cos() * config.rotary_factor, angles.sin() * config.rotary_factor


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns the pairs (x[i], x[i + G/2]) of each head."""
    first, second = x.float().chunk(2, -1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    return turned.to(x.dtype)


def next_token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy of each token given those before it, in nats."""
    wanted = labels[:, 1:].to(logits.device)
    return functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), wanted.flatten())
