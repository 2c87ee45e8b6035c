"""Runs `python -m t5x_diffeq.prepare_data`."""

from t5x_diffeq.cli import run_verb

run_verb("prepare_data", __name__)
