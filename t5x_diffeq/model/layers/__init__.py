"""Ordinary Linen layers: they own their weights and know nothing of depth or time."""
