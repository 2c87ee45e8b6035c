"""Published structures of depth, a file each: `--config.model.weights=examples.depth.FILE:NAME`."""
