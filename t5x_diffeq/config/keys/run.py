"""The keys that are in no section, and `config.mesh`: the mesh axes, and what lies on them."""

from dataclasses import dataclass
from functools import partial
from typing import Annotated

from t5x_diffeq.config.keys import values
from t5x_diffeq.config.keys.values import INT32, Section, Values, key, reads_as_data

_key = partial(key, finetune=True)
_AxisSize = Annotated[int, Values(int, -1, INT32)]
_mesh_key = partial(key, resume=True, finetune=True)
_RULES = (
    ("vocab", "tensor"),  # rows of the embedding, columns of the head, logits
    ("embed", "fsdp"),  # width of the state, in parameters only
    ("heads", "tensor"),  # attention heads
    ("mlp", "tensor"),  # width inside the MLP
    ("steps", None),  # solver steps: stacked weights are scanned, never split
    ("time_embed", None),  # T: not split, so that making W(t) needs no communication
)


@dataclass(frozen=True)
class RunKeys(Section):
    """`config` itself: the seed, and the run that `finetune` starts from."""

    seed: Annotated[int, Values(int, 0, values.SEEDS - 1)] = _key(0)
    """seed for initialisation, data order and dropout"""
    init_from: values.TextOrNone = _key(None, asks=reads_as_data)
    """for `finetune`: the workdir of the run whose model is tuned"""
    init_step: values.CountOrNone = _key(None)
    """for `finetune`: the step of that run's checkpoint. `None`: the newest"""


@dataclass(frozen=True)
class MeshKeys(Section):
    """`config.mesh`: the sizes of the mesh axes, and what lies on them."""

    section = "mesh"
    data: Annotated[int | None, Values(int, -1, INT32, optional=True)] = _mesh_key(None)
    """devices that split the batch and replicate the parameters. `None`: the number of TPU slices
    or GPU nodes, so that fsdp doesn't cross them (1 if there is one), or 1 on GPUs with too little
    memory for that"""
    fsdp: _AxisSize = _mesh_key(-1)
    """devices that split the batch and the parameters. `-1`: all that are left"""
    context: _AxisSize = _mesh_key(1)
    """devices that split each sequence"""
    tensor: _AxisSize = _mesh_key(1)
    """devices that split heads, MLP and vocabulary"""
    rules: values.Entries = _mesh_key(_RULES, asks=reads_as_data)
    """the mesh axes that split each logical axis of parameters and activations. A mesh axis splits
    an array once: in a kernel `("embed", "mlp")`, fsdp splits the first axis and tensor the second.
    Activations are split by batch (over data and fsdp) and by length (over context); their width is
    not an "embed" axis and stays whole, as does the width of a head"""
