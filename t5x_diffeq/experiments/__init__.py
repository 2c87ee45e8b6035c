"""Experiments: several runs, done once each, and the tables and figures that come of them."""
