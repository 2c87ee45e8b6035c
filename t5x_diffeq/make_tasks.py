"""Runs `python -m t5x_diffeq.make_tasks`."""

from t5x_diffeq.cli import run_verb

run_verb("make_tasks", __name__)
