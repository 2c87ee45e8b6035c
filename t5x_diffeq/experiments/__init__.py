"""Experiments: several runs, done once each, and the tables and figures that come of them."""

EXPERIMENTS = ("figure5", "figure7", "figure14", "figure15", "figure18", "table1")
