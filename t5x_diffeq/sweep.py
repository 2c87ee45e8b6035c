"""Runs `python -m t5x_diffeq.sweep`."""

from t5x_diffeq.cli import run_verb

run_verb("sweep", __name__)
