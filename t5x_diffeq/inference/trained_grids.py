"""The grids that a run was trained on, and what its loss on another one means.

W(t) is trained only at the nodes of the trained grids. Between them it is P e(t) untrained: noise
with the features of 1000 t, and close to the values at the nodes with a few polynomials of t.
"""

from t5x_diffeq.config.config import Config
from t5x_diffeq.model.ode.sources import source_of


def is_trained_grid(config: Config, scheme: str, num_steps: int | None) -> bool:
    """Whether the run of this config was trained with so many steps of the scheme.

    An adaptive solver, which has no number of steps, is never what a run was trained with.
    """
    trained = {config.model.num_steps, *config.train.depths}
    return scheme == config.model.scheme and num_steps in trained


def describe_trained_grids(config: Config) -> str:
    """`6 steps of euler`; `2, 4 and 12 steps of lie_trotter`."""
    *others, last = sorted({config.model.num_steps, *config.train.depths})
    steps = f"{', '.join(map(str, others))} and {last}" if others else f"{last}"
    return f"{steps} steps of {config.model.scheme}"


def is_smooth(config: Config) -> bool:
    """Whether the run has the settings with which the variant `:smooth` works on other grids.

    W(t) is made of at most as many polynomials as there are steps, and y(0) is large.
    """
    model = config.model
    source = source_of(model)
    return source.is_smooth() and not source.constant and model.embedding_scale > 1


def off_grid_warning(config: Config) -> str:
    """A warning about losses on grids that the model wasn't trained on."""
    return (
        f"the model was trained only with {describe_trained_grids(config)}, so W(t) is learned "
        "only at the times of that grid: a loss on another grid says little about the model; for a "
        "model that works on many grids, train the variant :smooth (configs/tiny.py:smooth), or "
        "with several train.depths (docs/depth.md)"
    )
