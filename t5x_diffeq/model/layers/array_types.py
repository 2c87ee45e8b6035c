"""The named array types of every signature, and the legend of their dimensions.

B  batch: sequences          N  solver steps
L  length: tokens            T  width of a time embedding
D  width of the state        S  frequencies of the time features
H  query heads               V  vocabulary, padded
K  key and value heads       G  width of a head
F  width of the MLP          nodes  times at which W is read, ordered by step
"""

from typing import Any, NamedTuple

from jaxtyping import Array, Float, Int

Tokens = Int[Array, "B L"]
Positions = Int[Array, "B L"]
Segments = Int[Array, "B L"]
Order = Int[Array, "B L"]
State = Float[Array, "B L D"]
Vector = Any  # what a scheme adds and scales: a state, with or without a running cost
States = Float[Array, "states B L D"]  # along a trajectory
Logits = Float[Array, "B L V"]
Times = Float[Array, " nodes"]

# What one evaluation of f remembers of earlier tokens, by name: keys and values, or another state.
Cache = dict[str, Any]

Tree = Any  # a tree of arrays

# A block's parameter tree; a source's tree has one more, leading axis: nodes.
Weights = dict[str, Any]


class Places(NamedTuple):
    """Where tokens stand."""

    positions: Positions  # the position of each token in its document
    # the number of each token's document, within which attention stays; None: a row is one document
    segments: Segments | None = None
    # the index of each token in its row, if several devices share a row (`layers.context`); None:
    # tokens are in the order of the row
    order: Order | None = None
