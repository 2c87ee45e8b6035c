"""Every key of a config: its type, and the values that it can take.

`configs/default.py` says what each key means. A key is checked whether or not the run uses it.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import inf

from t5x_diffeq.runtime.errors import InputError

# Names that the command line must know before JAX is imported, which takes seconds. They are
# defined in ode/solvers.py, models/adaptive.py, layers/attention_kernels.py and
# ode/integrate.py; tests/bad_input_test.py compares the two.
SCHEMES = ("euler", "lie_trotter", "strang", "midpoint", "heun", "rk4")
ADAPTIVE_SOLVERS = ("bosh3", "tsit5", "dopri5", "dopri8")
KERNELS = ("xla", "cudnn", "splash")
REMATS = ("none", "dots", "full")
CONVENTIONS = ("pair", "official", "full")  # of Lyapunov exponents: analysis/lyapunov.py

INT32 = 2**31 - 1  # steps and positions are counted in 32 bits
FLOAT32 = 3.4e38
STEPS = 10_000  # solver steps
VOCABULARY = 2**30  # tokens, so that their number fits in 32 bits when padded
THREADS = 1024
MOST_SHARDS = 99_999  # of a split: their names have five digits
NAMES = {
    int: "a whole number",
    float: "a number",
    str: "a text",
    bool: "True or False",
    tuple: "a tuple",
}
TYPES = {int: int, float: int | float, str: str, bool: bool, tuple: tuple | list}  # JSON has lists


@dataclass(frozen=True)
class Key:
    """The values that a key can take.

    Attributes:
      type: the type of a value; an int is accepted for a float, a list for a tuple.
      least: the smallest number.
      most: the largest number; for a float, None is the largest float32.
      open: which bounds are excluded: "[)", "(]", "()", or "[]" for none.
      choices: of a string, or of each entry of a tuple; in `every:k`, k is any integer of at least
        1, and in `keep:names`, names is a comma-separated list of words.
      entry: the key that each entry of a tuple follows.
      optional: whether the value can be None.
    """

    type: type
    least: float = -inf
    most: float | None = None
    open: str = "[]"
    choices: tuple[str, ...] = ()
    entry: "Key | None" = None
    optional: bool = False

    def fault(self, value: object) -> str | None:
        """What is wrong with a value: `it must be at least 1`; None if nothing is."""
        if value is None:
            return None if self.optional else f"it must be {NAMES[self.type]}"
        if not isinstance(value, TYPES[self.type]) or isinstance(value, bool) > (self.type is bool):
            return f"it must be {NAMES[self.type]}{' or None' if self.optional else ''}"
        if isinstance(value, tuple | list):
            entry = self.entry or Key(str, choices=self.choices)
            faults = (entry.fault(each) for each in value) if self.entry or self.choices else ()
            return next((f"of each entry, {fault}" for fault in faults if fault), None)
        if isinstance(value, str):
            return self.fault_of_text(value)
        return None if isinstance(value, bool) else self.fault_of_number(value)

    def fault_of_text(self, value: str) -> str | None:
        """`fault` for a string."""
        if not self.choices:
            return None if value else "it must not be empty; leave it out"
        if any(re.fullmatch(_pattern(choice), value) for choice in self.choices):
            return None
        return f"it can be {', '.join(self.choices)}"

    def fault_of_number(self, value: float) -> str | None:
        """`fault` for a number; NaN is out of every range."""
        most = FLOAT32 if self.most is None else self.most
        above = value > self.least if self.open[0] == "(" else value >= self.least
        below = value < most if self.open[1] == ")" else value <= most
        if above and below:
            return None
        if self.type is int:
            return f"it must be at most {most}" if above else f"it must be at least {self.least}"
        if self.most is not None:
            return f"it must be in {self.open[0]}{self.least}, {most}{self.open[1]}"
        bound = f"{'greater than' if self.open[0] == '(' else 'at least'} {self.least}, and "
        return f"it must be {bound if self.least > -inf else ''}finite in float32"


def _pattern(choice: str) -> str:
    number, names = r":0*[1-9]\d*", r":\w+(,\w+)*"
    return re.escape(choice).replace(":k", number).replace(":names", names)


SIZE = Key(int, 1, INT32)
SIZE_OR_NONE = Key(int, 1, INT32, optional=True)
POSITIVE = Key(float, 0, open="(]")
FRACTION = Key(float, 0, 1)
BELOW_ONE = Key(float, 0, 1, open="[)")
TEXT = Key(str)
TEXT_OR_NONE = Key(str, optional=True)
SWITCH = Key(bool)
FLOATS = Key(str, choices=("float32", "bfloat16"))
SECONDS = Key(float, 1)
MESH_AXIS = Key(int, -1, INT32)

KEYS = {
    "seed": Key(int, 0, 2**32 - 1),
    "init_from": TEXT_OR_NONE,
    "init_step": Key(int, 0, INT32, optional=True),
    # ------------------------------------------------------------------------------- model
    "model.architecture": Key(str, choices=("gpt", "llama")),
    "model.weights": Key(str, choices=("time_dependent", "per_layer", "shared")),
    "model.scheme": Key(str, choices=SCHEMES),
    "model.step_size": Key(str, choices=("1/N", "1")),
    "model.num_steps": Key(int, 1, STEPS),
    "model.embed_dim": SIZE,
    "model.num_heads": SIZE,
    "model.num_kv_heads": SIZE_OR_NONE,
    "model.mlp_dim": SIZE,
    "model.time_embed_dim": SIZE,
    "model.num_frequencies": SIZE,
    "model.time_scale": POSITIVE,
    "model.time_embedding": Key(str, choices=("per_layer", "shared")),
    "model.init": Key(str, choices=("paper", "invariant")),
    "model.norm_eps": POSITIVE,
    "model.final_norm_eps": POSITIVE,
    "model.norm_shift": SWITCH,
    "model.activation": Key(str, choices=("gelu", "relu", "silu"), optional=True),
    "model.mlp_input": Key(str, choices=("state", "attention_norm")),
    "model.dropout_rate": BELOW_ONE,
    "model.adapter_rank": Key(int, 0, INT32),
    "model.adapter_alpha": POSITIVE,
    "model.adapter_kernels": Key(
        tuple, choices=("qkv", "query", "key", "value", "output", "up", "gate", "down")
    ),
    "model.vocab_size": Key(int, 1, VOCABULARY, optional=True),
    "model.dtype": FLOATS,
    "model.state_dtype": FLOATS,
    "model.attention": Key(str, choices=("auto", *KERNELS, "splash:k")),
    "model.remat": Key(str, choices=(*REMATS, "every:k", "keep:names")),
    # -------------------------------------------------------------------------------- data
    "data.source": TEXT,
    "data.path": TEXT_OR_NONE,
    "data.validation_path": TEXT_OR_NONE,
    "data.text_field": TEXT,
    "data.data_dir": TEXT_OR_NONE,
    "data.train_split": TEXT,
    "data.validation_split": TEXT,
    "data.mixture": Key(tuple),
    "data.tokenizer": TEXT,
    "data.tokenizer_vocab_size": Key(int, 1, VOCABULARY),
    "data.end_of_text": TEXT_OR_NONE,
    "data.sequence_length": SIZE,
    "data.tokenize": Key(str, choices=("ahead", "in_loop")),
    "data.packing": Key(str, choices=("concat_then_split", "first_fit")),
    "data.cross_documents": SWITCH,
    "data.read_threads": Key(int, 1, THREADS),
    # ------------------------------------------------------------------------------- train
    "train.total_steps": SIZE,
    "train.batch_size": SIZE,
    "train.trainable": Key(
        tuple, choices=("source", "adapters", "embeddings", "head", "final_norm")
    ),
    "train.depths": Key(tuple, entry=Key(int, 1, STEPS)),
    "train.depths_per_step": SIZE,
    "train.depths_until": FRACTION,
    "train.microbatches": SIZE,
    "train.eval_batch_size": SIZE,
    "train.eval_batches": SIZE_OR_NONE,
    "train.eval_all_at_end": SWITCH,
    "train.loss_chunk": SIZE,
    "train.z_loss": Key(float, 0),
    "train.log_every": SIZE,
    "train.eval_every": SIZE,
    "train.checkpoint_every": SIZE,
    "train.keep_checkpoints": SIZE,
    "train.verify_checkpoints": SWITCH,
    "train.hang_timeout": SECONDS,
    "train.eval_timeout": SECONDS,
    "train.save_timeout": SECONDS,
    # ------------------------------------------------------------------------------- tasks
    "tasks.names": Key(tuple, entry=TEXT),
    "tasks.every": SIZE,
    "tasks.num_fewshot": Key(int, 0, INT32, optional=True),
    "tasks.limit": SIZE_OR_NONE,
    "tasks.include_path": TEXT_OR_NONE,
    # --------------------------------------------------------------------------- optimizer
    "optimizer.learning_rate": POSITIVE,
    "optimizer.beta1": BELOW_ONE,
    "optimizer.beta2": BELOW_ONE,
    "optimizer.epsilon": POSITIVE,
    "optimizer.moment_dtype": FLOATS,
    "optimizer.weight_decay": Key(float, 0),
    "optimizer.decay": Key(str, choices=("embeddings", "kernels", "all")),
    "optimizer.warmup_fraction": FRACTION,
    "optimizer.min_lr_ratio": FRACTION,
    "optimizer.max_grad_norm": POSITIVE,
    # -------------------------------------------------------------------------------- mesh
    "mesh.data": Key(int, -1, INT32, optional=True),
    "mesh.fsdp": MESH_AXIS,
    "mesh.tensor": MESH_AXIS,
    "mesh.rules": Key(tuple),
}


def check_values(values: Mapping[str, object], unset: Collection[str] = ()) -> None:
    """Checks that each key has a value that it can take.

    Args:
      values: the values by dotted key.
      unset: keys that may be None here although they must have a value in the end.

    Raises:
      InputError: if one hasn't; names the key, its value and what it can be.
    """
    for key, value in values.items():
        if key not in KEYS or (value is None and key in unset):
            continue
        fault = KEYS[key].fault(value)
        if fault:
            raise InputError(f"{key} is {value!r}; {fault}")
