"""Scripts to read and run, cell by cell or as a whole: `python -m t5x_diffeq.examples.NAME`."""
