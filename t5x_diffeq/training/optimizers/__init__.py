"""Optimizers: Adam, Muon, their moments and schedules."""
