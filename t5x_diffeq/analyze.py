"""Runs `python -m t5x_diffeq.analyze`."""

from t5x_diffeq.cli import run_verb

run_verb("analyze", __name__)
