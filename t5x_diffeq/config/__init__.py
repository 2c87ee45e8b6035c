"""The config: its keys, files that set them, plug-ins that they name, mistakes in them."""
