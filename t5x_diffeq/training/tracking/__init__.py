"""Where a run's numbers, texts and figures go: files of the workdir, and trackers."""
