"""A training system for neural ODE transformers."""

__version__ = "0.1.0"
