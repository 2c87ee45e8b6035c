"""The grids that a run was trained on, and what its numbers mean on others."""

from collections.abc import Sequence
from typing import NamedTuple

from t5x_diffeq.inference.trained_grids import (
    describe_trained_grids,
    is_smooth,
    is_trained_grid,
    off_grid_warning,
)
from t5x_diffeq.ode.schemes import SCHEMES
from t5x_diffeq.ode.sources import source_of
from t5x_diffeq.runtime.config import Config

Depth = tuple[int, str]  # number of solver steps and scheme
MOST_STEPS = 256  # that a request may ask for
_COARSER = (16, 20, 24, 32, 48, 64, 96, 128)


class Grids(NamedTuple):
    """The grids of a run.

    Attributes:
      config: the config with which it was trained.
      trained: the numbers of steps that it was trained with, in increasing order.
      offered: the numbers of steps that the page offers.
      schemes: the schemes that the page offers.
      smooth: whether W(t) is a smooth function, so that times between the nodes mean something.
    """

    config: Config
    trained: Sequence[int]
    offered: Sequence[int]
    schemes: Sequence[str]
    smooth: bool

    @classmethod
    def of(cls, config: Config) -> "Grids":
        """The grids of a run that was trained with this config."""
        model = config.model
        trained = sorted({model.num_steps, *config.train.depths})
        if not source_of(model).any_time:
            return cls(config, [model.num_steps], [model.num_steps], [model.scheme], False)
        most = 4 * trained[-1]
        near = range(1, min(max(2 * trained[-1], 12), MOST_STEPS) + 1)
        offered = sorted({*near, *trained, *(n for n in _COARSER if n <= most)})
        schemes = [*dict.fromkeys((model.scheme, *SCHEMES))]
        smooth = source_of(model).constant or is_smooth(config)  # shared weights are constant
        return cls(config, trained, offered, schemes, smooth)

    def note(self, grid: Depth) -> tuple[bool, str]:
        """Whether the run was trained on a grid; and what its numbers mean there, in a sentence."""
        num_steps, scheme = grid
        grids = describe_trained_grids(self.config)
        if is_trained_grid(self.config, scheme, num_steps):
            return True, f"The run was trained on this grid ({grids})."
        if self.smooth:
            return False, (
                f"The run was trained with {grids}, not on this grid. Its W(t) is a smooth "
                "function of t, so the numbers show how well the dial works."
            )
        warning = off_grid_warning(self.config)
        return False, f"{warning[0].upper()}{warning[1:]}."
