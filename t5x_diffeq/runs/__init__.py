"""Workdirs, and the models loaded from them."""
