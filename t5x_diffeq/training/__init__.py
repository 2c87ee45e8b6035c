"""Training: state, step, optimizer, sharding, checkpoints, metrics."""
