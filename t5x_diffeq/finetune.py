"""Runs `python -m t5x_diffeq.finetune`."""

from t5x_diffeq.cli import run_verb

run_verb("finetune", __name__)
