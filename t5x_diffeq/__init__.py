"""A training system for neural ODE transformers."""

from t5x_diffeq.system.failed_imports import IMPORT_ERRORS, raise_explained

try:
    from importlib import import_module
    from typing import TYPE_CHECKING

    from t5x_diffeq.system.extras import __version__
except IMPORT_ERRORS as error:
    raise_explained(error)

if TYPE_CHECKING:
    from t5x_diffeq.cli.train import train
    from t5x_diffeq.config.config import Config
    from t5x_diffeq.config.config_files import load_config
    from t5x_diffeq.inference.compare import Comparison, compare
    from t5x_diffeq.inference.sampling import Sampling
    from t5x_diffeq.inference.trained_run import TrainedRun, load
    from t5x_diffeq.model.block import Block
    from t5x_diffeq.model.ode.integrate import integrate_field as integrate
    from t5x_diffeq.model.ode.solvers import Scheme, VectorField, grid
    from t5x_diffeq.model.ode.time_basis import TimeBasis
    from t5x_diffeq.model.ode.weight_source import WeightSource
    from t5x_diffeq.training.hooks.hook import Hook
    from t5x_diffeq.training.terms import LogitsTerm, StatesTerm

__all__ = [
    "Block",
    "Comparison",
    "Config",
    "Hook",
    "LogitsTerm",
    "Sampling",
    "Scheme",
    "StatesTerm",
    "TimeBasis",
    "TrainedRun",
    "VectorField",
    "WeightSource",
    "__version__",
    "compare",
    "grid",
    "integrate",
    "load",
    "load_config",
    "train",
]
_HOMES = {  # the module of each name, and its name there
    "Block": ("model.block", "Block"),
    "Comparison": ("inference.compare", "Comparison"),
    "Config": ("config.config", "Config"),
    "Hook": ("training.hooks", "Hook"),
    "LogitsTerm": ("training.terms", "LogitsTerm"),
    "Sampling": ("inference.sampling", "Sampling"),
    "Scheme": ("model.ode.solvers", "Scheme"),
    "StatesTerm": ("training.terms", "StatesTerm"),
    "TimeBasis": ("model.ode.time_basis", "TimeBasis"),
    "TrainedRun": ("inference.trained_run", "TrainedRun"),
    "VectorField": ("model.ode.solvers", "VectorField"),
    "WeightSource": ("model.ode.weight_source", "WeightSource"),
    "compare": ("inference.compare", "compare"),
    "grid": ("model.ode.solvers", "grid"),
    "integrate": ("model.ode.integrate", "integrate_field"),
    "load": ("inference.trained_run", "load"),
    "load_config": ("config.config_files", "load_config"),
    "train": ("cli.train", "train"),
}


if not TYPE_CHECKING:  # else each misspelt name would have a type

    def __getattr__(name: str) -> object:
        """Imports a name of the interface when it is first used, and nothing heavy before."""
        if name not in _HOMES:
            raise AttributeError(
                f"module 't5x_diffeq' has no attribute {name!r}; it has {', '.join(__dir__())}; "
                "and load(WORKDIR) returns a run that can generate and evaluate"
            )
        module, attribute = _HOMES[name]
        try:
            return getattr(import_module(f"t5x_diffeq.{module}"), attribute)
        except IMPORT_ERRORS as error:
            raise_explained(error)


def __dir__() -> list[str]:
    """The names of the Python interface, which a notebook offers."""
    return sorted(__all__)
