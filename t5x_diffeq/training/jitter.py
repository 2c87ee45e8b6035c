"""Training between the nodes: `train.jitter`.

A scheme reads W(t) at the nodes of its grid and nowhere else, so training says nothing of W between
them. With jitter r, each optimizer step reads it instead at

    t_n - r u_n (t_n - t_(n-1)),    u_n uniform in [0, 1), drawn anew

where t_(n-1) is the node before t_n (0 before the first), of all grids that the step uses. At r = 1
each node is anywhere in its interval, and Euler's step is the random Euler scheme (Jentzen and
Neuenkirch 2009), which converges without W being smooth. As there, the step size stays dt: dt times
W at a random time of the interval is the integral of W over it in the mean, and dt times a random
length is not.

Nodes keep their order and remain distinct, and a node at t = 0 stays there. Schemes that read a
node twice, as Heun's ends of neighbouring steps, read it at one and the same time. All layers and
microbatches share the times. They depend on the seed and the step's number alone, so a resumed run
has the same ones. Nothing moves in evaluation.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from t5x_diffeq.array_types import Times
from t5x_diffeq.runtime.config import Config
from t5x_diffeq.runtime.errors import InputError

_DRAW = 0x1771E5  # distinguishes this use of a step's key from others


def check_jitter(config: Config) -> None:
    """Checks that there are nodes that can move.

    Raises:
      InputError: if weights exist at their own nodes alone or at all times, or the optimizer keeps
        gradients at the nodes.
    """
    if not config.train.jitter:
        return
    given = f"train.jitter={config.train.jitter}"
    if config.model.weights != "time_dependent":
        raise InputError(
            f"{given} moves the nodes of W(t), and model.weights={config.model.weights} has no "
            "W(t); leave it out, or take time_dependent"
        )
    if config.optimizer.moments == "factored":
        raise InputError(
            f"{given} moves the nodes, at which optimizer.moments=factored keeps gradients; take "
            "int8, or leave train.jitter out"
        )


def move_nodes(nodes: Float[np.ndarray, " nodes"], jitter: float, key: Array) -> Times:
    """The times at which an optimizer step reads W.

    Args:
      nodes: the different nodes of the step's grids, rising.
      jitter: r, in [0, 1].
      key: the key of the step.
    """
    u = jax.random.uniform(jax.random.fold_in(key, _DRAW), nodes.shape)
    return jnp.asarray(nodes) - jitter * u * jnp.diff(nodes, prepend=0)
