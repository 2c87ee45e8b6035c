"""Benchmarks of optimizer steps, generation, data and initialisation."""
