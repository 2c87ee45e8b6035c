"""A package outside the project: a block, a scheme, an optimizer and a data source of its own."""
