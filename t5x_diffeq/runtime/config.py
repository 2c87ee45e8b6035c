"""The config of a run: every key with its type and the values that it can take, frozen.

`configs/default.py` has the default of each key and says what it means. Config files return a
ConfigDict, whose values the command line can change. A verb makes it a `Config` at once, and only
`config_files` and `command_line` know ConfigDicts. A key is checked whether or not the run uses it.
"""

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from operator import attrgetter
from typing import Annotated, Any, ClassVar, Protocol, get_type_hints, runtime_checkable

from t5x_diffeq.runtime.config_keys import (
    INT32,
    KERNELS,
    MOMENTS,
    ONE_STEP_SCHEMES,
    PLUGIN,
    REMATS,
    REVERSIBLE,
    SCHEMES,
    SEEDS,
    STEP_RANGE,
    STEPS,
    THREADS,
    TIME_BASES,
    Key,
)
from t5x_diffeq.runtime.errors import InputError

_REVERSIBLES = tuple(REVERSIBLE + name for name in ONE_STEP_SCHEMES)
VOCABULARY = 2**30  # tokens, so that their number fits in 32 bits when padded


def _one_of(*choices: str) -> Key:
    return Key(str, choices=choices)


Size = Annotated[int, Key(int, 1, INT32)]
SizeOrNone = Annotated[int | None, Key(int, 1, INT32, optional=True)]
Count = Annotated[int, Key(int, 0, INT32)]
CountOrNone = Annotated[int | None, Key(int, 0, INT32, optional=True)]
SolverSteps = Annotated[int, Key(int, 1, STEPS)]
Positive = Annotated[float, Key(float, 0, open="(]")]
NotNegative = Annotated[float, Key(float, 0)]
Fraction = Annotated[float, Key(float, 0, 1)]
BelowOne = Annotated[float, Key(float, 0, 1, open="[)")]
Seconds = Annotated[float, Key(float, 1)]
Text = Annotated[str, Key(str)]
TextOrNone = Annotated[str | None, Key(str, optional=True)]
Switch = Annotated[bool, Key(bool)]
Dtype = Annotated[str, _one_of("float32", "bfloat16")]
Entries = Annotated[tuple, Key(tuple)]


@runtime_checkable
class NestedKeys(Protocol):
    """A ConfigDict, or the dict that a `config.json` holds."""

    def items(self) -> Iterable[tuple[str, Any]]:
        """Keys with values, which for a section have items themselves."""


@dataclass(frozen=True)
class _Section:
    """Raises an `InputError` if a key has a value that it can't take."""

    section: ClassVar[str]

    def __post_init__(self) -> None:
        keys = {f"{self.section}.{each.name}": getattr(self, each.name) for each in fields(self)}
        check_values({key: value for key, value in keys.items() if key in KEYS})


@dataclass(frozen=True)
class ModelKeys(_Section):
    """`config.model`; `ModelConfig` adds the vocabulary size and the sequence length."""

    section = "model"
    architecture: Annotated[str, _one_of("gpt", "llama")]
    weights: Annotated[str, _one_of("time_dependent", "per_layer", "shared")]
    block: Annotated[str | None, Key(str, choices=(PLUGIN,), optional=True)]
    scheme: Annotated[str, _one_of(*SCHEMES, *_REVERSIBLES, PLUGIN)]
    reversibility: Annotated[float, Key(float, 0, 1, open="(]")]
    step_size: Annotated[str, _one_of("1/N", "c/N", "1")]
    num_steps: SolverSteps
    embed_dim: Size
    num_heads: Size
    num_kv_heads: SizeOrNone
    head_dim: SizeOrNone
    mlp_dim: Size
    activation: Annotated[str | None, Key(str, choices=("gelu", "relu", "silu"), optional=True)]
    time_embed_dim: Size
    attention_time_embed_dim: SizeOrNone
    time_basis: Annotated[str, _one_of(*TIME_BASES)]
    num_frequencies: Size
    time_scale: Positive
    time_embedding: Annotated[str, _one_of("per_layer", "shared")]
    init: Annotated[str, _one_of("paper", "invariant")]
    norm_eps: Positive
    final_norm_eps: Positive
    norm_shift: Switch
    mlp_input: Annotated[str, _one_of("state", "attention_norm")]
    norm_position: Annotated[str, _one_of("before", "after")]
    qkv_bias: Switch
    qk_norm: Annotated[str, _one_of("none", "head", "projection")]
    rotary_base: Annotated[float, Key(float, 1, open="(]")]
    rotary_scaling: Entries
    tied_head: Switch
    embedding_scale: Positive
    position_scale: Positive
    dropout_rate: BelowOne
    adapter_rank: Count
    adapter_alpha: Positive
    adapter_kernels: Annotated[tuple[str, ...], Key(tuple, entry=Key(str))]
    vocab_size: Annotated[int | None, Key(int, 1, VOCABULARY, optional=True)]
    dtype: Dtype
    state_dtype: Dtype
    quantization: Annotated[str, _one_of("none", "int8", "fp8")]
    attention: Annotated[str, _one_of("auto", *KERNELS, "splash:k")]
    remat: Annotated[str, _one_of(*REMATS, "keep:names")]
    scan_unroll: SolverSteps
    pipeline_microbatches: SizeOrNone


@dataclass(frozen=True)
class DataKeys(_Section):
    """`config.data`: the text, its tokenizer, and how examples are made of it."""

    section = "data"
    source: Text
    path: TextOrNone
    validation_path: TextOrNone
    text_field: Text
    loss_on: Annotated[str, _one_of("all", "completion")]
    chat_template: TextOrNone
    data_dir: TextOrNone
    train_split: Text
    validation_split: Text
    mixture: Entries
    tokenizer: Text
    tokenizer_vocab_size: Annotated[int, Key(int, 1, VOCABULARY)]
    end_of_text: TextOrNone
    sequence_length: Size
    tokenize: Annotated[str, _one_of("ahead", "in_loop")]
    packing: Annotated[str, _one_of("concat_then_split", "first_fit")]
    cross_documents: Switch
    read_threads: Annotated[int, Key(int, 1, THREADS)]


@dataclass(frozen=True)
class TrainKeys(_Section):
    """`config.train`: the steps, their batches, and what happens between them."""

    section = "train"
    total_steps: Size
    batch_size: Size
    trainable: Annotated[
        tuple[str, ...],
        Key(tuple, choices=("source", "adapters", "embeddings", "head", "final_norm")),
    ]
    depths: Annotated[tuple[int, ...], Key(tuple, entry=Key(int, 1, STEPS))]
    depths_per_step: Size
    depths_rows: Annotated[str, _one_of("all", "every:k", "parts")]
    depths_distill: Fraction
    depths_until: Fraction
    distill_from: TextOrNone
    distill_step: CountOrNone
    distill_weight: Fraction
    microbatches: Size
    eval_batch_size: Size
    eval_batches: SizeOrNone
    eval_all_at_end: Switch
    eval_averages: Switch
    loss_chunk: Size
    velocity_penalty: NotNegative
    z_loss: NotNegative
    ema_decay: BelowOne
    on_spike: Annotated[str, _one_of("nothing", "skip", "rollback")]
    spike_deviations: Positive
    spike_window: Annotated[int, Key(int, 8, 2**16)]
    log_every: Size
    hooks: Annotated[tuple[str, ...], Key(tuple, choices=(PLUGIN,))]
    trackers: Annotated[tuple[str, ...], Key(tuple, choices=("tensorboard", "wandb", "trackio"))]
    sample_every: SizeOrNone
    sample_prompts: Annotated[tuple[str, ...], Key(tuple, entry=Key(str, can_be_empty=True))]
    figure_every: SizeOrNone
    eval_every: Size
    checkpoint_every: Size
    keep_checkpoints: Size
    keep_every: SizeOrNone
    keep_best: Count
    milestones: Annotated[tuple[int, ...], Key(tuple, entry=Key(int, 1, INT32))]
    local_checkpoints: TextOrNone
    local_checkpoint_every: Size
    verify_checkpoints: Switch
    watch_every: SizeOrNone
    profile: Annotated[str | None, Key(str, choices=(STEP_RANGE,), optional=True)]
    profile_processes: Annotated[tuple[int, ...], Key(tuple, entry=Key(int, 0, INT32))]
    memory_profile: Switch
    hang_timeout: Seconds
    compile_timeout: Seconds
    eval_timeout: Seconds
    save_timeout: Seconds


@dataclass(frozen=True)
class TasksKeys(_Section):
    """`config.tasks`: tasks of lm-evaluation-harness while the model trains."""

    section = "tasks"
    names: Annotated[tuple[str, ...], Key(tuple, entry=Key(str))]
    every: Size
    num_fewshot: CountOrNone
    limit: SizeOrNone
    include_path: TextOrNone


@dataclass(frozen=True)
class OptimizerKeys(_Section):
    """`config.optimizer`: AdamW or another optimizer, its schedule and its weight decay."""

    section = "optimizer"
    name: Annotated[str, _one_of("adam", "muon", PLUGIN)]
    learning_rate: Positive
    role_multipliers: Entries
    beta1: BelowOne
    beta2: BelowOne
    epsilon: Positive
    momentum: BelowOne
    moments: Annotated[str, _one_of(*MOMENTS)]
    offload: Switch
    weight_decay: NotNegative
    decay: Annotated[str, _one_of("embeddings", "kernels", "all")]
    schedule: Annotated[str, _one_of("cosine", "wsd")]
    warmup_fraction: Fraction
    cooldown_steps: CountOrNone
    min_lr_ratio: Fraction
    max_grad_norm: Positive


@dataclass(frozen=True)
class MeshKeys(_Section):
    """`config.mesh`: the sizes of the mesh axes, and what lies on them."""

    section = "mesh"
    stage: Annotated[int, Key(int, -1, INT32)]
    data: Annotated[int | None, Key(int, -1, INT32, optional=True)]
    fsdp: Annotated[int, Key(int, -1, INT32)]
    expert: Annotated[int, Key(int, -1, INT32)]
    context: Annotated[int, Key(int, -1, INT32)]
    tensor: Annotated[int, Key(int, -1, INT32)]
    rules: Entries


@dataclass(frozen=True)
class Config:
    """All keys.

    Raises:
      InputError: if a key has a value that it can't take; names both, and what it can take.
    """

    seed: Annotated[int, Key(int, 0, SEEDS - 1)]
    init_from: TextOrNone
    init_step: CountOrNone
    model: ModelKeys
    data: DataKeys
    train: TrainKeys
    tasks: TasksKeys
    optimizer: OptimizerKeys
    mesh: MeshKeys

    def __post_init__(self) -> None:
        check_values({key: getattr(self, key) for key in ("seed", "init_from", "init_step")})

    @classmethod
    def of(cls, nested: NestedKeys) -> "Config":
        """The config of a ConfigDict, or of the content of a `config.json`.

        Raises:
          InputError: if a key is missing, doesn't exist, or has a value that it can't take.
        """
        parts: dict[str, Any] = {
            key: dict(value.items()) if key in SECTIONS else value for key, value in nested.items()
        }
        given = {f"{key}.{name}" for key in parts.keys() & SECTIONS.keys() for name in parts[key]}
        check_complete(given | (parts.keys() - SECTIONS.keys()))
        for key, section in SECTIONS.items():
            parts[key] = section(**{name: _freeze(value) for name, value in parts[key].items()})
        return cls(**parts)

    def with_values(self, values: Mapping[str, object]) -> "Config":
        """The config with other values for some dotted keys.

        Raises:
          InputError: if a key can't take its value; names both, and what it can take.
        """
        of_section: dict[str, dict[str, Any]] = {}
        for key, value in values.items():
            section, _, name = key.rpartition(".")
            of_section.setdefault(section, {})[name] = _freeze(value)
        own = of_section.pop("", {})
        sections = {key: replace(getattr(self, key), **new) for key, new in of_section.items()}
        return replace(self, **own, **sections)

    def flat(self) -> dict[str, Any]:
        """The values by dotted key."""
        return {key: attrgetter(key)(self) for key in KEYS}

    def as_json(self) -> dict[str, Any]:
        """The config as read back from `config.json`: tuples become lists."""
        return json.loads(json.dumps(asdict(self)))


SECTIONS: dict[str, type[_Section]] = {
    each.section: each
    for each in (ModelKeys, DataKeys, TrainKeys, TasksKeys, OptimizerKeys, MeshKeys)
}


def _keys(section: type, prefix: str = "") -> dict[str, Key]:
    hints = get_type_hints(section, include_extras=True).items()
    own = {f"{prefix}{name}": hint for name, hint in hints if hasattr(hint, "__metadata__")}
    return {key: hint.__metadata__[0] for key, hint in own.items()}


KEYS = _keys(Config) | {
    key: values
    for section in SECTIONS.values()
    for key, values in _keys(section, f"{section.section}.").items()
}


def check_complete(given: Collection[str]) -> None:
    """Checks that these are all keys of a config.

    Raises:
      InputError: if one is missing, or doesn't exist; names it.
    """
    for key in sorted(KEYS.keys() ^ given):
        wrong = "is missing" if key in KEYS else "does not exist"
        raise InputError(f"config key {key!r} {wrong}; begin with configs.default.get_config()")


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


def check_values(values: Mapping[str, object], unset: Collection[str] = ()) -> None:
    """Checks that each key has a value that it can take.

    Args:
      values: the values by dotted key.
      unset: keys that may be None here although they must have a value in the end.

    Raises:
      InputError: if one hasn't; names the key, its value and what it can be.
    """
    for key, value in values.items():
        fault = None if value is None and key in unset else KEYS[key].fault(value)
        if fault:
            raise InputError(f"{key} is {value!r}; {fault}")


def _freeze(value: Any) -> Any:
    """The value with tuples for lists, which JSON has instead."""
    return tuple(map(_freeze, value)) if isinstance(value, list | tuple) else value
