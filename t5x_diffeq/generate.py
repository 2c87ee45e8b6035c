"""Runs `python -m t5x_diffeq.generate`."""

from t5x_diffeq.cli import run_verb

run_verb("generate", __name__)
