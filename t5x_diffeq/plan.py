"""Runs `python -m t5x_diffeq.plan`."""

from t5x_diffeq.cli import run_verb

run_verb("plan", __name__)
