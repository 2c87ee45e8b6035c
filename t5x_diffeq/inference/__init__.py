"""A trained run: its Python interface, text, scores, tasks; `explorer` shows it as a page."""
