"""Runs `python -m t5x_diffeq.train`."""

from t5x_diffeq.cli import run_verb

run_verb("train", __name__)
