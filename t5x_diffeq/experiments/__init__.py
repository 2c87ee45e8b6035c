"""Experiments: several runs, done once each, and the table and figure that come of them."""

EXPERIMENTS = ("figure5",)
