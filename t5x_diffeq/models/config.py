"""The model's configuration: frozen, checked once, passed whole."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf

import jax.numpy as jnp

from t5x_diffeq.errors import InputError
from t5x_diffeq.layers.attention_kernels import KERNELS, STAND_IN, check, choose
from t5x_diffeq.ode.integrate import uniform_step_size
from t5x_diffeq.ode.solvers import SCHEMES, grid

VOCAB_MULTIPLE = 128
CHOICES = {
    "architecture": ("gpt", "llama"),
    "weights": ("time_dependent", "per_layer", "shared"),
    "scheme": tuple(SCHEMES),
    "step_size": ("1/N", "1"),
    "time_embedding": ("per_layer", "shared"),
    "init": ("paper", "invariant"),
    "mlp_input": ("state", "attention_norm"),
    "attention": ("auto", *KERNELS),
    "dtype": ("float32", "bfloat16"),
    "state_dtype": ("float32", "bfloat16"),
}
ACTIVATIONS = {"gpt": ("gelu", "relu"), "llama": ("silu",)}  # the first is the default


@dataclass(frozen=True)
class ModelConfig:
    """The keys of `config.model` (each explained in configs/default.py) and the length.

    Attributes:
      max_length: the longest sequence, in tokens: `config.data.sequence_length`.
    """

    architecture: str
    weights: str
    scheme: str
    step_size: str
    num_steps: int
    embed_dim: int
    num_heads: int
    num_kv_heads: int | None
    mlp_dim: int
    activation: str | None
    time_embed_dim: int
    num_frequencies: int
    time_scale: float
    time_embedding: str
    init: str
    norm_eps: float
    final_norm_eps: float
    norm_shift: bool
    mlp_input: str
    dropout_rate: float
    adapter_rank: int
    adapter_alpha: float
    adapter_kernels: tuple[str, ...]
    vocab_size: int
    dtype: str
    state_dtype: str
    remat: str
    attention: str
    max_length: int

    @classmethod
    def of(cls, keys: Mapping[str, object], vocab_size: int, max_length: int) -> "ModelConfig":
        """From the keys of `config.model`, the tokenizer's vocabulary and the sequence length.

        Raises:
          InputError: if a value can't be used, or states another vocabulary.
        """
        if keys["vocab_size"] not in (None, vocab_size):
            raise InputError(
                f"model.vocab_size is {keys['vocab_size']}, and the tokenizer has {vocab_size} "
                "tokens; leave it None to take the tokenizer's"
            )
        kernels = tuple(keys["adapter_kernels"])  # JSON has lists
        known = {"vocab_size": vocab_size, "max_length": max_length, "adapter_kernels": kernels}
        return cls(**{**keys, **known})

    def __post_init__(self):
        for key, choices in CHOICES.items():
            value = getattr(self, key)
            name = value.partition(":")[0] if key == "attention" else value
            if name not in (*choices, STAND_IN):
                raise InputError(f"model.{key} is {value!r}; it can be {', '.join(choices)}")
        if self.state_dtype == "bfloat16" and self.dtype == "float32":
            raise InputError(
                "model.state_dtype=bfloat16 with model.dtype=float32: the state is never narrower "
                "than the computation; set model.dtype=bfloat16 or leave model.state_dtype out"
            )
        if self.mlp_activation not in ACTIVATIONS[self.architecture]:
            raise InputError(
                f"model.activation={self.activation} with model.architecture={self.architecture}: "
                f"it can be {' or '.join(ACTIVATIONS[self.architecture])}"
            )
        self.check_sizes()
        for key in ("norm_eps", "final_norm_eps", "time_scale"):
            if not 0 < getattr(self, key) < inf:
                raise InputError(f"model.{key} is {getattr(self, key)}; it must be greater than 0")
        if not 0 <= self.dropout_rate < 1:
            raise InputError(f"model.dropout_rate is {self.dropout_rate}; it must be in [0, 1)")
        self.check_adapters()

    def with_attention_for(self, platform: str) -> tuple["ModelConfig", str]:
        """The config with "auto" attention resolved for the platform, and why so.

        Raises:
          InputError: if the kernel that it names can't be used there.
        """
        shapes = (platform, self.dtype, self.embed_dim // self.num_heads, self.max_length)
        if self.attention != "auto":
            return self, check(self.attention, *shapes)
        kernel, reason = choose(*shapes)
        return replace(self, attention=kernel), reason

    def in_float32(self) -> "ModelConfig":
        """The same model, all of it computed in float32."""
        return replace(self, dtype="float32", state_dtype="float32")

    def check_adapters(self):
        """Adapters stand beside layer weights alone."""
        if self.adapter_rank < 0:
            raise InputError(f"model.adapter_rank is {self.adapter_rank}; it must be at least 0")
        if self.adapter_rank and self.weights != "per_layer":
            raise InputError(
                f"model.adapter_rank={self.adapter_rank} with model.weights={self.weights}: "
                "adapters stand beside the kernels of a grid, so they need per_layer weights (the "
                "finetune verb makes these from any run)"
            )
        if not 0 < self.adapter_alpha < inf:
            raise InputError(
                f"model.adapter_alpha is {self.adapter_alpha}; it must be greater than 0"
            )

    def check_sizes(self):
        """Sizes are positive and divide where they must."""
        sizes = ("embed_dim", "num_heads", "mlp_dim", "time_embed_dim", "num_frequencies")
        for key in (*sizes, "num_steps", "vocab_size", "max_length"):
            if getattr(self, key) < 1:
                raise InputError(f"model.{key} is {getattr(self, key)}; it must be at least 1")
        if self.embed_dim % self.num_heads:
            raise InputError(
                f"model.embed_dim={self.embed_dim} is not divisible by "
                f"model.num_heads={self.num_heads}"
            )
        if self.num_kv_heads is not None and self.num_kv_heads < 1:
            raise InputError(f"model.num_kv_heads is {self.num_kv_heads}; it must be at least 1")
        if self.num_heads % self.kv_heads:
            raise InputError(
                f"model.num_heads={self.num_heads} is not divisible by "
                f"model.num_kv_heads={self.kv_heads}"
            )
        if self.architecture == "gpt" and self.kv_heads != self.num_heads:
            raise InputError(
                f"model.num_kv_heads={self.kv_heads}: gpt's q, k and v are one linear, so it must "
                f"equal model.num_heads={self.num_heads} (or be None); llama can have fewer"
            )
        if self.architecture == "llama" and self.embed_dim // self.num_heads % 2:
            raise InputError(
                f"model.embed_dim={self.embed_dim} over model.num_heads={self.num_heads} gives "
                "heads of odd width, which rotary positions cannot turn; make it even"
            )

    @property
    def kv_heads(self) -> int:
        """Key and value heads."""
        return self.num_kv_heads or self.num_heads

    @property
    def mlp_activation(self) -> str:
        """The MLP's activation; the architecture's own unless the config names one."""
        return self.activation or ACTIVATIONS[self.architecture][0]

    @property
    def padded_vocab_size(self) -> int:
        """The vocabulary rounded up to a multiple of 128, whatever the mesh."""
        return -(-self.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE

    @property
    def dt(self) -> float:
        """The step size."""
        return uniform_step_size(self.step_size, self.num_steps)

    @property
    def num_nodes(self) -> int:
        """Times at which a forward pass reads the weights."""
        return grid(self.scheme, self.num_steps).size

    @property
    def compute_dtype(self) -> jnp.dtype:
        """Dtype of the computation; parameters are float32."""
        return jnp.dtype(self.dtype)
