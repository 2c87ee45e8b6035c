"""Parareal: slices of depth are integrated at once, in place of the serial pass; see README.md."""
