"""Runs `python -m t5x_diffeq.status`."""

from t5x_diffeq.cli import run_verb

run_verb("status", __name__)
