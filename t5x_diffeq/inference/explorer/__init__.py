"""A local page that shows a trained run at any depth, and its endpoints."""
