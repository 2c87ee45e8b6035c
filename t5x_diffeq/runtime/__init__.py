"""Interfaces to the machine and the user: command line, files, other processes, console."""
