"""Runs `python -m t5x_diffeq.export`."""

from t5x_diffeq.cli import run_verb

run_verb("export", __name__)
