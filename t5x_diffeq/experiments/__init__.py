"""Experiments: sets of runs, each done once, and the tables and figures made from them."""
