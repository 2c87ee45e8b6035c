"""Models: a config, the blocks, and the language model around them."""
