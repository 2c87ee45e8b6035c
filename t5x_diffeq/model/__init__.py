"""The model: a config, the blocks, and the language model around them.

`ode` holds the idea, weights that are functions of depth. `layers` holds what blocks are made of.
"""
