"""Training: the step and its terms, the state and its sharding, the loop and its hooks.

`optimizers` has the optimizers; `tracking` has the places to which numbers, texts and figures go.
"""
