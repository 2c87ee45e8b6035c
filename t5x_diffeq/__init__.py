"""A training system for neural ODE transformers."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from t5x_diffeq.inference.trained_run import TrainedRun, load

__version__ = "0.1.0"
__all__ = ["TrainedRun", "__version__", "load"]


def __getattr__(name: str) -> object:
    """Imports what stands in `__all__` when it is first used, and nothing heavy before."""
    if name not in __all__:
        raise AttributeError(f"module 't5x_diffeq' has no attribute {name!r}")
    from t5x_diffeq.inference import trained_run

    return getattr(trained_run, name)
