"""Turns documents into batches that are a pure function of seed and step."""
