"""Hooks, which do what a training loop does besides its steps, and the arguments of hooks."""

from t5x_diffeq.training.hooks.hook import DoneStep, Hook, LoopPosition, PreparedRun, Training

__all__ = ["DoneStep", "Hook", "LoopPosition", "PreparedRun", "Training"]
