"""Research that the core knows nothing of; each package is run by itself, and has a README."""
