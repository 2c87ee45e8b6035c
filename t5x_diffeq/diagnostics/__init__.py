"""Diagnoses a model that trains: curves over depth, and where values stop being finite."""
