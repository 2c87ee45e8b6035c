"""The one idea: weights that are functions of depth, and a solver that integrates through them."""
