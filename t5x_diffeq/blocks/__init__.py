"""Blocks beside GPT's and Llama's, each written against `models.block.Block` alone."""
