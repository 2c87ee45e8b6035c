"""Runs `python -m t5x_diffeq.benchmark`."""

from t5x_diffeq.cli import run_verb

run_verb("benchmark", __name__)
