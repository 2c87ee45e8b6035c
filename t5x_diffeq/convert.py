"""Runs `python -m t5x_diffeq.convert`."""

from t5x_diffeq.cli import run_verb

run_verb("convert", __name__)
