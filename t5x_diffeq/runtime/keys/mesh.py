"""`config.mesh`: the sizes of the mesh axes, and what lies on them."""

from dataclasses import dataclass
from functools import partial
from typing import Annotated

from t5x_diffeq.runtime.keys.key import Entries, Section, key
from t5x_diffeq.runtime.keys.values import INT32, Values

_AxisSize = Annotated[int, Values(int, -1, INT32)]
_key = partial(key, resume=True, finetune=True)
_RULES = (
    ("vocab", "tensor"),  # rows of the embedding, columns of the head, logits
    ("embed", "fsdp"),  # width of the state, in parameters only; stages always split it, too
    ("heads", "tensor"),  # attention heads
    ("mlp", "tensor"),  # width inside the MLP
    ("experts", "expert"),  # experts of a mixture
    ("steps", None),  # solver steps: stacked weights are not split at rest
    ("time_embed", None),  # T: not split, so that making W(t) needs no communication
)


@dataclass(frozen=True)
class MeshKeys(Section):
    """`config.mesh`: the sizes of the mesh axes, and what lies on them."""

    section = "mesh"
    stage: _AxisSize = _key(
        1,
        """stages, each of which takes its part of the solver steps; they also split what fsdp
        splits of the parameters, but not the batch""",
    )
    data: Annotated[int | None, Values(int, -1, INT32, optional=True)] = _key(
        None,
        """devices that split the batch and replicate the parameters; None: the number of TPU slices
        or GPU nodes, because fsdp should not cross them (1 without several); of GPUs with too
        little memory for that, 1""",
    )
    fsdp: _AxisSize = _key(
        -1, "devices that split the batch and the parameters; -1: all that are left"
    )
    expert: _AxisSize = _key(
        1, "devices that split the batch and the experts of a mixture, if there is one"
    )
    context: _AxisSize = _key(
        1, "devices that split each sequence, if one is too long for a device"
    )
    tensor: _AxisSize = _key(1, "devices that split heads, MLP and vocabulary")
    rules: Entries = _key(
        _RULES,
        """The mesh axes that split each logical axis of parameters and activations. A mesh axis
        splits an array once: in a kernel ("embed", "mlp"), fsdp splits the first axis and tensor
        the second. Activations are split by batch, over data, fsdp and expert, and by length, over
        context, so their width is not an "embed" axis and stays whole, as does the width of a
        head.""",
    )
