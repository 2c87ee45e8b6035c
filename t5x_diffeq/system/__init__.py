"""The machine and the user: files and buckets, locks, errors, console, memory, chips, packages."""
