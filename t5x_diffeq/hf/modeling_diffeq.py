"""A neural ODE transformer on its grid, in PyTorch, for transformers 4.53 or later.

    y <- y + f_n(y) + g_n(y)                          Euler: attention and MLP read the same state
    y <- y + f_n(y); y <- y + g_n(y)                  Lie-Trotter

for n = 1..N, with the weights W(t_n) of each step and the step size inside the last linear of
attention f and of MLP g. The state y is float32, even if the weights are loaded in 16 bits, because
its steps are small and would be rounded away. This file lies beside the weights, and needs nothing
of t5x_diffeq:

    AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)

Attention is what `attn_implementation` names (eager, sdpa, flex_attention, flash_attention_2, or a
serving engine's own), with the library's masks and caches.

Licensed under Apache-2.0.
"""

from inspect import signature

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import DynamicCache, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

# transformers 5.24 calls `cache` what earlier versions call `past_key_values`. The model takes both
# names, and its output has the name that the library's own outputs have.
OUTPUTS = CausalLMOutputWithPast.__dataclass_fields__
CACHE_NAME = "cache" if "cache" in OUTPUTS else "past_key_values"
MASK_ARGUMENTS = signature(create_causal_mask).parameters

TENSOR_PARALLEL = {
    "steps.*.attention.query": "colwise",
    "steps.*.attention.key": "colwise",
    "steps.*.attention.value": "colwise",
    "steps.*.attention.output": "rowwise",
    "steps.*.mlp.up": "colwise",
    "steps.*.mlp.gate": "colwise",
    "steps.*.mlp.down": "rowwise",
}

DEFAULTS = {
    # "gpt" (LayerNorm, biases, learned positions), or "llama" (RMSNorm, a gated MLP, rotary
    # positions, grouped queries)
    "architecture": "gpt",
    "parallel": True,  # attention and MLP read the same state (Euler), or one after the other
    "mlp_reads_attention_norm": False,  # the MLP's norm reads the attention's, not the state
    "norm_shift": True,  # of the norms of the steps
    "norm_position": "before",  # attention and MLP, or "after" them
    "qkv_bias": True,  # of queries, keys and values
    "qk_norm": "none",  # or "head" (of each head) or "projection" (of all heads together)
    "tie_word_embeddings": True,  # the head is the tokens' own vectors
    "embedding_scale": 1.0,  # factor on the tokens' vectors
    "rotary_frequencies": None,  # radians per token of each pair of a head (llama)
    "rotary_factor": 1.0,  # on cosines and sines
    "activation": "gelu",  # of the MLP; or "relu" (gpt), "silu" (llama)
    "norm_eps": 1e-5,  # of the norms of the steps
    "final_norm_eps": 1e-5,  # of the norm before the head
    "vocab_size": 256,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 16,
    "initializer_range": 0.02,
    "use_cache": True,
}


class DiffEqConfig(PretrainedConfig):
    """Shapes, under the library's usual names, and what makes the model an ODE's (`DEFAULTS`)."""

    model_type = "t5x_diffeq"
    keys_to_ignore_at_inference = ["past_key_values", "cache"]  # noqa: RUF012

    def __init__(self, **kwargs):
        for name, default in DEFAULTS.items():
            setattr(self, name, kwargs.pop(name, default))
        if self.architecture == "llama" and self.qk_norm != "projection":  # a norm over all heads
            self.base_model_tp_plan = TENSOR_PARALLEL
        super().__init__(tie_word_embeddings=self.tie_word_embeddings, **kwargs)

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
        return y.to(self.weight.dtype)  # the dtype of the next weights; the state may be wider


class Attention(nn.Module):
    """f without its norm; the step size is in `output`."""

    is_causal = True

    def __init__(self, config: DiffEqConfig, step: int):
        super().__init__()
        self.config, self.layer_idx = config, step
        self.gpt, self.head_dim, self.scaling = config.gpt, config.head_dim, config.head_dim**-0.5
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        width, queries = config.hidden_size, config.num_attention_heads * config.head_dim
        keys, bias = config.num_key_value_heads * self.head_dim, config.qkv_bias
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
            self.q_norm = Norm(self.head_dim if head else queries, False, False, eps)
            self.k_norm = Norm(self.head_dim if head else keys, False, False, eps)

    def forward(self, x: Tensor, turn, mask, cache: Cache | None, **kwargs):
        """`[B, L, D]` to `[B, L, D]`, and the attention's weights if the backend returns them.

        `turn` are cosines and sines `[B, 1, L, G/2]` that turn queries and keys, or None for gpt;
        `mask` and `kwargs` go to the backend.
        """
        parts = (
            self.qkv(x).chunk(3, -1) if self.gpt else (self.query(x), self.key(x), self.value(x))
        )
        q, k, v = parts
        if self.qk_norm == "projection":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in (q, k, v))
        if self.qk_norm == "head":
            q, k = self.q_norm(q), self.k_norm(k)
        if turn is not None:
            q, k = rotate(q, *turn), rotate(k, *turn)
        if cache is not None:
            # A static cache of transformers 4 doesn't count its tokens, and needs their places.
            places = {"cache_position": kwargs.get("cache_position")}
            k, v = cache.update(k, v, self.layer_idx, places)
        backend = self.config._attn_implementation
        if hasattr(ALL_ATTENTION_FUNCTIONS, "get_interface"):
            attend = ALL_ATTENTION_FUNCTIONS.get_interface(backend, attend_eagerly)
        else:  # transformers 4.53
            attend = ALL_ATTENTION_FUNCTIONS.get(backend, attend_eagerly)
        mixed, weights = attend(self, q, k, v, mask, scaling=self.scaling, dropout=0.0, **kwargs)
        return self.output(mixed.reshape(*x.shape[:-1], -1)), weights


def attend_eagerly(module, query, key, value, mask, scaling, dropout=0.0, **kwargs):
    """Softmax attention in plain operations, which also returns its weights.

    The shapes are `[B, H, L, G]` of query, `[B, H / groups, K, G]` of key and value, and
    `[B, 1, L, K]` of a mask, which is added to the scores times `scaling`.
    """
    groups = module.num_key_value_groups
    key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    scores = (query @ key.transpose(2, 3)).float() * scaling
    scores = scores if mask is None else scores + mask[..., : key.shape[2]]
    weights = scores.softmax(-1).to(value.dtype)
    return (weights @ value).transpose(1, 2), weights


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


class Step(GradientCheckpointingLayer):
    """One step of the scheme."""

    def __init__(self, config: DiffEqConfig, step: int):
        super().__init__()
        norm = (config.hidden_size, config.gpt, config.norm_shift, config.norm_eps)
        self.attention_norm, self.mlp_norm = Norm(*norm), Norm(*norm)
        self.attention, self.mlp = Attention(config, step), MLP(config)
        self.parallel = config.parallel
        self.mlp_reads_attention_norm = config.mlp_reads_attention_norm
        self.norms_last = config.norm_position == "after"

    def forward(self, y: Tensor, **attending) -> Tensor:
        """The state after the step; `attending` goes to `Attention`."""
        f = self.f(y, **attending)
        if self.parallel:
            return y + f + self.g(y)
        y = y + f
        return y + self.g(y)

    def f(self, y: Tensor, **attending) -> Tensor:
        """The attention's part."""
        if self.norms_last:
            narrow = y.to(self.attention_norm.weight.dtype)
            return self.attention_norm(self.attention(narrow, **attending)[0])
        return self.attention(self.attention_norm(y), **attending)[0]

    def g(self, y: Tensor) -> Tensor:
        """The MLP's part."""
        if self.norms_last:
            return self.mlp_norm(self.mlp(y.to(self.mlp_norm.weight.dtype)))
        x = self.attention_norm(y) if self.mlp_reads_attention_norm else y
        return self.mlp(self.mlp_norm(x))


class DiffEqPreTrainedModel(PreTrainedModel):
    """The attributes and the initialisation that the library needs of both classes below."""

    config_class = DiffEqConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["Step"]  # noqa: RUF012
    _skip_keys_device_placement = ["cache", "past_key_values"]  # noqa: RUF012
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_flash_attn = True
    _supports_flash_attn_2 = True  # the name in transformers 4.53
    _supports_attention_backend = True
    _supports_cache_class = True
    _supports_static_cache = True
    _can_compile_fullgraph = True

    def _init_weights(self, module):
        super()._init_weights(module)
        if isinstance(module, Norm):
            nn.init.ones_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)


class DiffEqModel(DiffEqPreTrainedModel):
    """Embed, step N times, normalise."""

    step_class = Step  # a subclass for another block names its own

    def __init__(self, config: DiffEqConfig):
        super().__init__(config)
        width = config.hidden_size
        self.token_embedding = nn.Embedding(config.vocab_size, width)
        if config.gpt:
            self.position_embedding = nn.Embedding(config.max_position_embeddings, width)
        modules = range(self.num_modules())
        self.steps = nn.ModuleList(self.step_class(config, n) for n in modules)
        self.final_norm = Norm(width, config.gpt, config.gpt, config.final_norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding:
        """The tokens' vectors."""
        return self.token_embedding

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        """Replaces the tokens' vectors."""
        self.token_embedding = value

    def num_modules(self) -> int:
        """The length of `steps`: N, as each step has its own weights."""
        return self.config.num_hidden_layers

    def every_step(self):
        """The steps of the grid, in order."""
        return self.steps

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        cache_position: Tensor | None = None,
        cache: Cache | None = None,
        **kwargs,
    ) -> BaseModelOutputWithPast | tuple:
        """The normalised last state `[B, L, D]`.

        Args:
          input_ids: `[B, L]`, new tokens; or `inputs_embeds`, `[B, L, D]`.
          attention_mask: `[B, tokens so far]`, 0 where there is padding; or a mask of the backend.
          position_ids: `[B, L]`; None counts the tokens that are no padding.
          past_key_values: keys and values of the tokens before, until transformers 5.23.
          output_attentions: whether to return the weights of attention (`eager` has them).
          output_hidden_states: whether to return the states at t_0 .. t_N, the last normalised.
          cache_position: `[L]`, the new tokens' places in the cache, until transformers 5.
          cache: the same as `past_key_values`, since transformers 5.24.
          kwargs: for the attention's backend.

        Raises:
          ValueError: if not exactly one of `input_ids` and `inputs_embeds` is given.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("exactly one of input_ids and inputs_embeds must be given")
        config = self.config
        use_cache = config.use_cache if use_cache is None else use_cache
        return_dict = config.return_dict if return_dict is None else return_dict
        if output_attentions is None:
            output_attentions = config.output_attentions
        if output_hidden_states is None:
            output_hidden_states = config.output_hidden_states
        x = self.token_embedding(input_ids) if inputs_embeds is None else inputs_embeds
        cache = past_key_values if cache is None else cache
        if self.gradient_checkpointing and self.training and torch.is_grad_enabled():
            use_cache, cache = False, None  # a recomputed step would write its keys again
        if use_cache and cache is None:
            cache = DynamicCache()
        past = 0 if cache is None else cache.get_seq_length()
        if cache_position is None:
            cache_position = torch.arange(x.shape[1], device=x.device) + past
        if position_ids is None:
            position_ids = positions(attention_mask, cache_position, x)
        offered = {"config": config, "attention_mask": attention_mask, "cache": cache}
        offered |= {"inputs_embeds": x, "input_embeds": x, "position_ids": position_ids}
        offered |= {"past_key_values": cache, "cache_position": cache_position}
        mask = create_causal_mask(**{k: v for k, v in offered.items() if k in MASK_ARGUMENTS})

        y = x.to(torch.promote_types(x.dtype, torch.float32)) * config.embedding_scale
        if config.gpt:
            y, turn = y + self.position_embedding(position_ids), None
        else:
            turn = turning(position_ids, config)
        states, weights, hooks = [y], [], []
        if output_attentions:
            record = lambda module, inputs, output: weights.append(output[1])  # noqa: E731
            attentions = [module for module in self.modules() if isinstance(module, Attention)]
            hooks = [module.register_forward_hook(record) for module in attentions]
        kwargs |= {"cache_position": cache_position, "position_ids": position_ids}
        for step in self.every_step():
            y = step(y, turn=turn, mask=mask, cache=cache, **kwargs)
            states.append(y)
        for hook in hooks:
            hook.remove()
        states[-1] = self.final_norm(y)
        output = BaseModelOutputWithPast(
            last_hidden_state=states[-1],
            hidden_states=tuple(states) if output_hidden_states else None,
            attentions=tuple(weights) if output_attentions else None,
            **{CACHE_NAME: cache if use_cache else None},
        )
        return output if return_dict else output.to_tuple()


class DiffEqForCausalLM(DiffEqPreTrainedModel, GenerationMixin):
    """The model with a head, which multiplies the last state by the vocabulary's vectors."""

    model_class = DiffEqModel  # a subclass for another block names its own
    _tied_weights_keys = {"lm_head.weight": "model.token_embedding.weight"}  # noqa: RUF012

    def __init__(self, config: DiffEqConfig):
        super().__init__(config)
        self.model = self.model_class(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding:
        """The tokens' vectors."""
        return self.model.token_embedding

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        """Replaces the tokens' vectors."""
        self.model.token_embedding = value

    def get_output_embeddings(self) -> nn.Linear:
        """The head."""
        return self.lm_head

    def set_output_embeddings(self, value: nn.Linear) -> None:
        """Replaces the head."""
        self.lm_head = value

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        return_dict: bool | None = None,
        cache: Cache | None = None,
        **kwargs,
    ) -> CausalLMOutputWithPast | tuple:
        """Logits of each token's successor, and the loss where `labels` are given.

        Args, in addition to the arguments of `DiffEqModel`:
          labels: `[B, L]`, the tokens again; -100 does not count.
          logits_to_keep: of how many last tokens logits are wanted, 0: of all; or their places.
          kwargs: of `DiffEqModel`, of the attention's backend, and of the loss.
        """
        states = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            cache=past_key_values if cache is None else cache,
            return_dict=True,
            **kwargs,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(states.last_hidden_state[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, vocab_size=self.config.vocab_size, **kwargs)
        output = CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            hidden_states=states.hidden_states,
            attentions=states.attentions,
            **{CACHE_NAME: states.get(CACHE_NAME)},
        )
        return_dict = self.config.return_dict if return_dict is None else return_dict
        return output if return_dict else output.to_tuple()


def positions(attention_mask: Tensor | None, places: Tensor, x: Tensor) -> Tensor:
    """`[B, L]`: each new token's place among the tokens that are no padding."""
    if attention_mask is None or attention_mask.dim() != 2:
        return places.expand(x.shape[:2])
    return (attention_mask.long().cumsum(-1) - 1).clamp(min=0)[:, places]


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
