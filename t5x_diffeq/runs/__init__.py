"""A workdir, and what is loaded from it."""
