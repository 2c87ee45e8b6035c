"""Runs `python -m t5x_diffeq.reproduce`."""

from t5x_diffeq.cli import run_verb

run_verb("reproduce", __name__)
