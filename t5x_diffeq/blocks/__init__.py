"""Blocks beside GPT's and Llama's, each a subclass of `models.block.Block`."""
