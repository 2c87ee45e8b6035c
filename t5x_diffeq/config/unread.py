"""Notes on given values that have no effect, because of the value of another key.

They aren't refused: a config file's variants share overrides, and not every variant reads all of
them. Values that only a config file sets have no notes for the same reason.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

from t5x_diffeq.config.keys.values import Values, one_of


class Unread(NamedTuple):
    """Keys that are not read with some values of another key."""

    keys: tuple[str, ...]
    other: str
    values: Values  # those of the other key


_OF_TIME = (
    *("model.time_embed_dim", "model.attention_time_embed_dim", "model.time_basis"),
    *("model.num_frequencies", "model.time_scale", "model.time_embedding", "model.init"),
)
_OF_SINUSOIDS = ("model.num_frequencies", "model.time_scale")
_OF_LLAMA = ("model.tied_head", "model.qkv_bias", "model.norm_shift", "model.rope_theta")
_OF_ADAPTERS = ("model.adapter_alpha", "model.adapter_kernels")
_OF_SPIKES = ("train.spike_deviations", "train.spike_window")
_SETS_OF_WEIGHTS, _NO_RANK = one_of("per_layer", "shared"), Values(int, 0, 0)
UNREAD = (
    Unread(_OF_TIME, "model.weights", _SETS_OF_WEIGHTS),
    Unread(_OF_SINUSOIDS, "model.time_basis", one_of("legendre:k", "table:k")),
    Unread(_OF_LLAMA, "model.architecture", one_of("gpt")),
    Unread(_OF_ADAPTERS, "model.adapter_rank", _NO_RANK),
    Unread(("optimizer.momentum",), "optimizer.name", one_of("adam")),
    Unread(("data.tokenizer_vocab_size",), "data.tokenizer", one_of("bytes")),
    Unread(("data.data_dir",), "data.source", one_of("stdlib", "text_files", "tokens")),
    Unread(("data.read_threads",), "data.source", one_of("stream")),
    Unread(("data.text_field", "data.max_unreadable"), "data.source", one_of("stdlib", "tokens")),
    Unread(_OF_SPIKES, "train.on_spike", one_of("nothing")),
)
_WITHOUT_ROLE = (  # the values of a key with which the model has no parameters of a role
    ("time_embedding", "model.weights", _SETS_OF_WEIGHTS),
    ("adapter", "model.adapter_rank", _NO_RANK),
)


def notes(values: Mapping[str, Any], given: Collection[str]) -> Iterator[str]:
    """A line for each key of a config that was given for nothing.

    Args:
      values: the values of all keys, by dotted key.
      given: the keys that were given beside a config file, on the command line or in Python.
    """
    for keys, other, without in UNREAD:
        value = values[other]  # None: that of a run which is tuned
        if value is not None and not without.fault(value):
            for key in filter(given.__contains__, keys):
                yield (
                    f"note: {key}={values[key]} does nothing with {other}={value}; leave it out, "
                    f"or change {other}"
                )
    remat, products = values["model.remat"], values["model.products"]
    if "model.remat" in given and "fp8" in remat and products != "fp8":
        yield (
            f"note: model.remat={remat} keeps no fp8 inputs with model.products={products}; leave "
            "fp8 out, or set model.products=fp8"
        )
    for role, other, without in _WITHOUT_ROLE:
        pairs = values["optimizer.role_multipliers"]  # whose entries aren't checked yet
        named = any(role in pair for pair in pairs if isinstance(pair, tuple))
        if "optimizer.role_multipliers" in given and named and not without.fault(values[other]):
            yield (
                f"note: optimizer.role_multipliers names {role}, of which the model has no "
                f"parameters with {other}={values[other]}"
            )
    path = str(values["data.path"])
    if "data.text_field" in given and path.endswith((".txt", ".md", ".py", ".csv", ".tsv")):
        yield (
            f"note: data.text_field={values['data.text_field']} does nothing with data.path="
            f"{path}, whose files are text as a whole; leave it out"
        )
    total = values["train.total_steps"]
    late = [step for step in values["train.milestones"] if step > total]
    if "train.milestones" in given and late:
        yield (
            f"note: train.milestones={late} come after train.total_steps={total}, so no checkpoint "
            "is kept for them unless the run is made longer"
        )
    if "train.log_every" in given and values["train.log_every"] > total:
        yield (
            f"note: train.log_every={values['train.log_every']} is more than train.total_steps="
            f"{total}, so no training loss is reported before the end"
        )
    every, evaluated = values["train.checkpoint_every"], values["train.eval_every"]
    best = values["train.keep_best"]
    if "train.keep_best" in given and best and every % evaluated:
        yield (
            f"note: train.keep_best={best} chooses among checkpoints that are evaluated, and "
            f"train.checkpoint_every={every} is no multiple of train.eval_every={evaluated}; make "
            "it one"
        )
