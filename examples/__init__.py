"""Scripts to read and run, cell by cell or as a whole: `python -m examples.NAME`."""
