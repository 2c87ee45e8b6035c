"""Parameters that declare what they are.

Code that treats parameters by kind reads the kind from the parameter itself: the hypernetwork
(`ode.weight_source`) generates a leaf by its role, the optimizer decays by role and scales by
`step_multiplier`, and discretisation divides what writes to the residual stream by the step size.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct
from flax.traverse_util import flatten_dict

from t5x_diffeq.model.layers.array_types import Tree

ROLES = ("kernel", "bias", "scale", "shift", "embedding", "time_embedding", "adapter")


@struct.dataclass
class Parameter(nn.LogicallyPartitioned):
    """A parameter's value, boxed with its declarations; Linen unboxes it on use.

    Attributes:
      names: logical axis of each dimension (inherited from `nn.LogicallyPartitioned`).
      role: one of `ROLES`.
      writes_residual: whether it belongs to the last map before the residual stream, so that
        scaling it (with its bias) scales the sub-field.
      fan_in: number of inputs that a kernel sums over; 1 for all other roles.
      step_multiplier: factor on the optimizer's step for this parameter.
      takes_adapter: whether the module that declares it adds a low-rank branch (`layers.linear`).
    """

    role: str = struct.field(default="kernel", pytree_node=False)
    writes_residual: bool = struct.field(default=False, pytree_node=False)
    fan_in: int = struct.field(default=1, pytree_node=False)
    step_multiplier: float = struct.field(default=1.0, pytree_node=False)
    takes_adapter: bool = struct.field(default=False, pytree_node=False)


def num_inputs(shape: Sequence[int], fan_in: int) -> int:
    """How many leading dimensions of a kernel make up its `fan_in` inputs; ValueError if none."""
    for n in range(len(shape) + 1):
        if prod(shape[:n]) == fan_in:
            return n
    raise ValueError(f"no leading dimensions of {tuple(shape)} make up {fan_in} inputs")


def is_parameter(node: object) -> bool:
    """Whether `node` is a boxed parameter (an `is_leaf` for tree maps)."""
    return isinstance(node, Parameter)


def map_parameters(function: Callable, declared: Tree) -> Tree:
    """The tree with `function(parameter)` in place of each boxed parameter."""
    return jax.tree.map(function, declared, is_leaf=is_parameter)


def flatten_parameters(declared: Tree) -> dict[tuple[str, ...], Any]:
    """The parameters of a tree in their boxes, by path."""
    return flatten_dict(declared, is_leaf=lambda _, node: is_parameter(node))


def declare(
    module: nn.Module,
    name: str,
    initializer: Callable[..., jax.Array],
    shape: Sequence[int],
    axes: Sequence[str | None],
    role: str,
    *,
    writes_residual: bool = False,
    fan_in: int | None = None,
    step_multiplier: float = 1.0,
    takes_adapter: bool = False,
) -> jax.Array:
    """`module.param(name)` in float32, boxed with its declarations.

    Raises:
      ValueError: if `role` is not one of `ROLES`, `axes` and `shape` differ in length, or a kernel
        has no `fan_in`.
    """
    if role not in ROLES:
        raise ValueError(f"{name}: unknown role {role!r}; roles are {', '.join(ROLES)}")
    if role == "kernel" and fan_in is None:
        raise ValueError(f"{name}: a kernel must say its fan_in, the number of its inputs")
    if len(axes) != len(shape):
        raise ValueError(f"{name}: {len(axes)} logical axes for {len(shape)} dimensions")

    def boxed(key: jax.Array) -> Parameter:
        value = initializer(key, tuple(shape), jnp.float32)
        return Parameter(
            value,
            tuple(axes),
            role=role,
            writes_residual=writes_residual,
            fan_in=fan_in or 1,
            step_multiplier=step_multiplier,
            takes_adapter=takes_adapter,
        )

    return module.param(name, boxed)  # type: ignore[return-value]  # Linen unboxes it
