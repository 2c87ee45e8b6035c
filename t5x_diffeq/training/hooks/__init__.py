"""What a training loop does beside its steps: hooks, and what they are given."""

from t5x_diffeq.training.hooks.hook import DoneStep, Hook, LoopPosition, PreparedRun, Training

__all__ = ["DoneStep", "Hook", "LoopPosition", "PreparedRun", "Training"]
