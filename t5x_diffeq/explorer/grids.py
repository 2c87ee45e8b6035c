"""Which grids a run was trained on, and what its numbers mean on others."""

from collections.abc import Sequence
from math import pi
from typing import NamedTuple

from t5x_diffeq.models.config import ModelConfig
from t5x_diffeq.ode.schemes import SCHEMES
from t5x_diffeq.runtime.config import Config

Depth = tuple[int, str]  # number of solver steps and scheme
MOST_STEPS = 256  # that a request may ask for
_COARSER = (16, 20, 24, 32, 48, 64, 96, 128)


class Grids(NamedTuple):
    """The grids of a run.

    Attributes:
      trained: the numbers of steps that it was trained with, in increasing order.
      scheme: the scheme that it was trained with.
      offered: the numbers of steps that the page offers.
      schemes: the schemes that the page offers.
      smooth: whether W(t) is a smooth function, so that times between the nodes mean something.
    """

    trained: Sequence[int]
    scheme: str
    offered: Sequence[int]
    schemes: Sequence[str]
    smooth: bool

    @classmethod
    def of(cls, config: Config, model: ModelConfig) -> "Grids":
        """The grids of a run of this config."""
        own = model.num_steps
        trained = sorted({own, *config.train.depths})
        if model.weights == "per_layer":
            return cls([own], model.scheme, [own], [model.scheme], False)
        most = 4 * trained[-1]
        near = range(1, min(max(2 * trained[-1], 12), MOST_STEPS) + 1)
        offered = sorted({*near, *trained, *(n for n in _COARSER if n <= most)})
        schemes = [*dict.fromkeys((model.scheme, *SCHEMES))]
        return cls(trained, model.scheme, offered, schemes, _is_smooth(model))

    def note(self, grid: Depth) -> tuple[bool, str]:
        """Whether the run was trained on a grid; and what its numbers mean there, in a sentence."""
        num_steps, scheme = grid
        counts = ", ".join(map(str, self.trained))
        of = f"{counts} {'step' if counts == '1' else 'steps'} of {self.scheme}"
        if num_steps in self.trained and scheme == self.scheme:
            return True, f"The run was trained on this grid ({of})."
        if self.smooth:
            return False, (
                f"The run was trained with {of}, not on this grid. Its W(t) is a smooth function "
                "of t, so the numbers show how well the dial works."
            )
        return False, (
            f"The run was trained with {of}. Its W(t) has no meaning between those nodes, so the "
            "numbers here say little. configs/tiny.py:smooth has a W(t) that is smooth, and "
            "train.depths trains on several grids."
        )


def _is_smooth(model: ModelConfig) -> bool:
    """Polynomials are; sinusoids of a small scale turn less than half of a time within a step."""
    if model.weights == "time_dependent" and model.time_basis == "sinusoids":
        return model.time_scale < pi * model.num_steps
    return model.weights == "shared" or model.time_basis.startswith("legendre")
