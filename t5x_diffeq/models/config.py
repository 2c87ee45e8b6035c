"""The model's configuration: immutable, checked once, passed as a whole."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import jax.numpy as jnp

from t5x_diffeq.layers.attention_kernels import STAND_IN, check, choose
from t5x_diffeq.ode.integrate import kept_names, uniform_step_size
from t5x_diffeq.ode.solvers import grid
from t5x_diffeq.runtime.config_keys import check_values
from t5x_diffeq.runtime.errors import InputError

VOCAB_MULTIPLE = 128
ACTIVATIONS = {"gpt": ("gelu", "relu"), "llama": ("silu",)}  # the first is the default


def check_vocab_size(stated: int | None, vocab_size: int) -> None:
    """Checks that `model.vocab_size`, if it is set, is the size of the tokenizer's vocabulary.

    Raises:
      InputError: if the sizes differ, naming both.
    """
    if stated not in (None, vocab_size):
        raise InputError(
            f"model.vocab_size is {stated}, and the tokenizer has {vocab_size} tokens; leave it "
            "None to take the tokenizer's"
        )


@dataclass(frozen=True)
class ModelConfig:
    """The keys of `config.model` (each explained in configs/default.py) and the sequence length.

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
    def of(cls, keys: Mapping[str, Any], vocab_size: int, max_length: int) -> "ModelConfig":
        """Makes one from the keys of `config.model`, the vocabulary size and the sequence length.

        Raises:
          InputError: if a value can't be used, or is another vocabulary size than the tokenizer's.
        """
        check_vocab_size(keys["vocab_size"], vocab_size)
        kernels = tuple(keys["adapter_kernels"])  # lists in JSON
        known = {"vocab_size": vocab_size, "max_length": max_length, "adapter_kernels": kernels}
        return cls(**{**keys, **known})

    def __post_init__(self):
        values = {f"model.{field.name}": getattr(self, field.name) for field in fields(self)}
        if self.attention == STAND_IN:  # not a value that a user can choose
            del values["model.attention"]
        check_values({**values, "data.sequence_length": self.max_length})
        self._check_choices()
        self._check_heads()
        self._check_adapters()

    def with_attention_for(self, platform: str) -> tuple["ModelConfig", str]:
        """The config with "auto" attention resolved for the platform, and the reason.

        Raises:
          InputError: if the kernel that the config names can't be used there.
        """
        shapes = (platform, self.dtype, self.embed_dim // self.num_heads, self.max_length)
        if self.attention != "auto":
            return self, check(self.attention, *shapes)
        kernel, reason = choose(*shapes)
        return replace(self, attention=kernel), reason

    def in_float32(self) -> "ModelConfig":
        """The same model, computed in float32 throughout."""
        return replace(self, dtype="float32", state_dtype="float32")

    def _check_choices(self):
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
        if self.remat.startswith("keep:"):
            kept_names(self.remat)

    def _check_adapters(self):
        if self.adapter_rank and self.weights != "per_layer":
            raise InputError(
                f"model.adapter_rank={self.adapter_rank} with model.weights={self.weights}: "
                "adapters stand beside the kernels of a grid, so they need per_layer weights (the "
                "finetune verb makes these from any run)"
            )

    def _check_heads(self):
        if self.embed_dim % self.num_heads:
            raise InputError(
                f"model.embed_dim={self.embed_dim} is not divisible by "
                f"model.num_heads={self.num_heads}"
            )
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
        """The number of key and value heads."""
        return self.num_kv_heads or self.num_heads

    @property
    def mlp_activation(self) -> str:
        """The MLP's activation: the architecture's default unless the config names one."""
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
        """The number of times at which a forward pass reads the weights."""
        return grid(self.scheme, self.num_steps).size

    @property
    def compute_dtype(self) -> jnp.dtype:
        """The dtype of the computation; parameters are float32."""
        return jnp.dtype(self.dtype)
