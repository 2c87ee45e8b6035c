"""The model: a config, the blocks, and the language model around them.

`ode` has the idea, weights that are functions of depth; `layers` what a block is made of.
"""
