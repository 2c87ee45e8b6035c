"""Checkpoints: saving, verifying, keeping and restoring them."""
