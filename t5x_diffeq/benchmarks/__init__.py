"""Measurements of steps, generation, data and initialisation."""
