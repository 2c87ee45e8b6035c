"""Runs `python -m t5x_diffeq.evaluate`."""

from t5x_diffeq.cli import run_verb

run_verb("evaluate", __name__)
