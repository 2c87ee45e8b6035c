"""Checkpoints, which are saved, verified, kept and restored; and the workdir that they are in."""
