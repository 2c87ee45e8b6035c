"""Runs `python -m t5x_diffeq.explore`."""

from t5x_diffeq.cli import run_verb

run_verb("explore", __name__)
