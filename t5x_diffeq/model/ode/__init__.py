"""The idea: weights that are functions of depth, and a solver that integrates with them."""
