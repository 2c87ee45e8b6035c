"""The model's configuration: immutable, checked once, passed as a whole."""

from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from t5x_diffeq.config.config import ModelKeys, check_values, check_vocab_size
from t5x_diffeq.config.keys.values import VocabSize
from t5x_diffeq.model.layers.attention_kernels import check_kernel, choose
from t5x_diffeq.model.layers.rotary import BASE, check_scaling
from t5x_diffeq.model.ode.integrate import kept_names
from t5x_diffeq.model.ode.solvers import find_scheme, grid
from t5x_diffeq.model.ode.sources import source_of
from t5x_diffeq.system.errors import InputError

VOCAB_MULTIPLE = 128
ACTIVATIONS = {"gpt": ("gelu", "relu"), "llama": ("silu", "gelu")}  # the first is the default
_MOST_UNROLLED = 32  # most solver steps in a loop's body, which compiles in 2 to 3 times the time
# Row-major states need jax 0.12. The compiler of jax 0.10 would make two slices of TPUs gather each
# other's states for this layout.
_ROW_MAJOR_SINCE = (0, 12)
# The keys that only llama obeys, with the values that gpt must leave them at: gpt has learned
# positions, biases everywhere and a tied head.
_LLAMA_KEYS = {"qkv_bias": False, "rope_theta": BASE, "rope_scaling": (), "tied_head": False}


@dataclass(frozen=True, kw_only=True)
class ModelConfig(ModelKeys):
    """The keys of `config.model`, and the values that the data and the platform determine."""

    vocab_size: VocabSize = field()  # the vocabulary size of the tokenizer
    max_length: int  # the longest sequence, in tokens: `config.data.sequence_length`
    merge_tokens: bool = True  # whether linears merge batch and length (`Linear.merge_tokens`)
    state_row_major: bool = False  # whether the loop carries the state row by row (`integrate`)

    @classmethod
    def of(cls, keys: ModelKeys, vocab_size: int, max_length: int) -> "ModelConfig":
        """Makes a config from `config.model`, the vocabulary size and the sequence length.

        Raises:
          InputError: if values can't be used together, or `model.vocab_size` isn't the tokenizer's.
        """
        check_vocab_size(keys.vocab_size, vocab_size)
        return cls(**{**vars(keys), "vocab_size": vocab_size, "max_length": max_length})

    def __post_init__(self) -> None:
        check_values({"data.sequence_length": self.max_length})
        super().__post_init__()
        self._check_choices()
        self._check_heads()
        self._check_adapters()

    def with_attention_for(
        self,
        platform: str,
        segments: bool = False,
        shards: int = 1,
        capability: str | None = None,
    ) -> tuple["ModelConfig", str]:
        """The config with a kernel in place of "auto" attention, and the reason for the kernel.

        The arguments are those of `attention_kernels.choose`.

        Raises:
          InputError: if the platform lacks the kernel that the config names.
        """
        shapes = (platform, self.dtype, self.head_width, self.max_length)
        rows = (segments, shards, capability)
        if self.attention != "auto":
            return self, check_kernel(self.attention, *shapes, *rows)
        kernel, reason = choose(*shapes, *rows)
        return replace(self, attention=kernel), reason

    def for_platform(self, platform: str) -> "ModelConfig":
        """The config with the layouts that suit the platform, and with a number for `scan_unroll`.

        On an H100, an unrolled loop over solver steps makes an optimizer step take 0.82 to 0.89 of
        the time (docs/lab/h100.md): what the loop stores for the backward pass is neither zeroed
        nor copied. With `remat=full` the loop stores little, and the compiler would recompute many
        unrolled steps at once, in five times the memory. A TPU's compiler writes products straight
        into the arrays that the loop stores only if their tokens aren't merged, and copies every
        stored state unless the loop carries it row by row (docs/lab/tpu_step.md).
        """
        tpu = platform == "tpu"
        row_major = tpu and jax.__version_info__ >= _ROW_MAJOR_SINCE
        config = replace(self, merge_tokens=not tpu, state_row_major=row_major)
        if self.scan_unroll is not None:
            return config
        unrolled = platform == "gpu" and self.remat != "full"
        parts = -(-self.num_steps // _MOST_UNROLLED)
        return replace(config, scan_unroll=-(-self.num_steps // parts) if unrolled else 1)

    def at_depth(self, num_steps: int | None, scheme: str | None = None) -> "ModelConfig":
        """The same model, with the same parameters, on another grid; None keeps the model's own.

        Raises:
          InputError: if the weights, or the scheme, exist only on the model's own grid; if the
            scheme changes, and the old or the new one has leaves; if a value isn't valid.
        """
        changes: dict[str, Any] = {}
        if num_steps is not None:
            check_values({"model.num_steps": num_steps})
            changes = {"num_steps": num_steps}
        if scheme is not None and scheme != self.scheme:
            check_values({"model.scheme": scheme})
            changes["scheme"] = scheme
        other = replace(self, **changes)
        with_leaves = [name for name in (self.scheme, other.scheme) if find_scheme(name).leaves]
        if other.scheme != self.scheme and with_leaves:
            raise InputError(
                f"scheme {other.scheme}: this model's is {self.scheme}, and {with_leaves[0]} has "
                "leaves of its own, which are trained with it; keep the scheme"
            )
        if not find_scheme(other.scheme).any_grid and other.num_steps != self.num_steps:
            raise InputError(
                f"num_steps={other.num_steps}: the scheme {other.scheme} says that it exists for "
                f"its own num_steps={self.num_steps} alone (any_grid=False); leave num_steps out"
            )
        trained_nodes, nodes = (grid(c.scheme, c.num_steps) for c in (self, other))
        if not source_of(self).any_time and not np.array_equal(trained_nodes, nodes):
            raise InputError(
                f"num_steps={other.num_steps} with scheme {other.scheme} reads weights at other "
                f"times than num_steps={self.num_steps} with scheme {self.scheme}, and "
                f"{self.weights} weights exist only at their own times; keep num_steps "
                "and scheme, or take a run of time_dependent or shared weights"
            )
        return other

    @property
    def any_num_steps(self) -> bool:
        """Whether the model exists with other numbers of steps."""
        return source_of(self).any_time and find_scheme(self.scheme).any_grid

    def in_float32(self) -> "ModelConfig":
        """The same model, computed in float32 throughout."""
        return replace(self, dtype="float32", state_dtype="float32", products="dtype")

    def _check_choices(self):
        if self.vocab_rows < self.vocab_size:
            raise InputError(
                f"model.embedding_rows={self.embedding_rows}, and the tokenizer has "
                f"{self.vocab_size} tokens, each of which needs a row; leave it None"
            )
        if self.state_dtype == "bfloat16" and self.dtype == "float32":
            raise InputError(
                "model.state_dtype=bfloat16 with model.dtype=float32: the state is never narrower "
                "than the computation; set model.dtype=bfloat16 or leave model.state_dtype out"
            )
        if self.products == "fp8" and self.dtype == "float32":
            raise InputError(
                "model.products=fp8 with model.dtype=float32: products of fp8 operands are rounded "
                "to bfloat16; set model.dtype=bfloat16 or leave model.products out"
            )
        if self.mlp_activation not in ACTIVATIONS[self.architecture]:
            raise InputError(
                f"model.activation={self.activation} with model.architecture={self.architecture}: "
                f"it can be {' or '.join(ACTIVATIONS[self.architecture])}"
            )
        for key, value in _LLAMA_KEYS.items() if self.architecture == "gpt" else ():
            if getattr(self, key) != value:
                raise InputError(
                    f"model.{key}={getattr(self, key)!r} with model.architecture=gpt: the key is "
                    "llama's; leave it out"
                )
        if self.architecture == "llama" and self.position_scale != 1:
            raise InputError(
                f"model.position_scale={self.position_scale} with model.architecture=llama, which "
                "has no position embeddings; leave it out (model.embedding_scale is the tokens')"
            )
        if (self.norm_position, self.mlp_input) == ("after", "attention_norm"):
            raise InputError(
                "model.mlp_input=attention_norm with model.norm_position=after: the attention's "
                "input is then not normalised; leave one of them out"
            )
        if self.block is not None and self.norm_position == "after":
            raise InputError(
                f"model.norm_position=after with model.block={self.block}: the key is of the "
                "architecture's own block, and another places its norms itself; leave one out"
            )
        check_scaling(self.rope_scaling)
        if self.remat.startswith("keep:"):
            kept_names(self.remat)
        if self.attention_time_embed_dim is not None and self.time_embedding == "common":
            raise InputError(
                f"model.attention_time_embed_dim={self.attention_time_embed_dim} with "
                "model.time_embedding=common: one embedding has one width; leave one of them out"
            )

    def _check_adapters(self):
        if self.adapter_rank and source_of(self).any_time:
            raise InputError(
                f"model.adapter_rank={self.adapter_rank} with model.weights={self.weights}: "
                "adapters stand beside the kernels of a grid, so they need per_layer weights (the "
                "finetune verb makes these from any run)"
            )

    def _check_heads(self):
        if self.head_dim is None and self.embed_dim % self.num_heads:
            raise InputError(
                f"model.embed_dim={self.embed_dim} is not divisible by "
                f"model.num_heads={self.num_heads}; change one of them or set model.head_dim"
            )
        if self.num_heads % self.kv_heads:
            raise InputError(
                f"model.num_heads={self.num_heads} is not divisible by "
                f"model.num_kv_heads={self.kv_heads}; choose a divisor, or None for as many"
            )
        if self.architecture == "gpt" and self.kv_heads != self.num_heads:
            raise InputError(
                f"model.num_kv_heads={self.kv_heads}: gpt's q, k and v are one linear, so it must "
                f"equal model.num_heads={self.num_heads} (or be None); llama can have fewer"
            )
        if self.architecture == "llama" and self.head_width % 2:
            raise InputError(
                f"model.embed_dim={self.embed_dim} over model.num_heads={self.num_heads} gives "
                "heads of odd width, which rotary positions cannot turn; make it even"
                if self.head_dim is None
                else f"model.head_dim={self.head_dim} is odd, and rotary positions turn pairs; "
                "make it even"
            )

    @property
    def kv_heads(self) -> int:
        """The number of key and value heads."""
        return self.num_kv_heads or self.num_heads

    @property
    def head_width(self) -> int:
        """The width of a head."""
        return self.head_dim or self.embed_dim // self.num_heads

    @property
    def has_tied_head(self) -> bool:
        """Whether the head is the embedding table."""
        return self.architecture == "gpt" or self.tied_head

    @property
    def mlp_activation(self) -> str:
        """The MLP's activation: the architecture's default unless the config names one."""
        return self.activation or ACTIVATIONS[self.architecture][0]

    @property
    def padded_vocab_size(self) -> int:
        """The vocabulary rounded up to a multiple of 128, whatever the mesh."""
        return -(-self.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE

    @property
    def vocab_rows(self) -> int:
        """The rows of the embedding and of the head, without padding; at least one per token."""
        return self.embedding_rows or self.vocab_size

    @property
    def padded_vocab_rows(self) -> int:
        """`vocab_rows` rounded up to a multiple of 128."""
        return -(-self.vocab_rows // VOCAB_MULTIPLE) * VOCAB_MULTIPLE

    @property
    def dt(self) -> float:
        """The factor of a step, c/N for the ODE dy/dt = c F on [0, 1], 1 for a residual network."""
        c, is_divided, _ = self.step_size.partition("/N")
        return float(c) / self.num_steps if is_divided else 1.0

    @property
    def num_nodes(self) -> int:
        """The number of times at which a forward pass reads the weights."""
        return grid(self.scheme, self.num_steps).size

    @property
    def compute_dtype(self) -> jnp.dtype:
        """The dtype of the computation; parameters are float32."""
        return jnp.dtype(self.dtype)
