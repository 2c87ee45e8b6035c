"""What a process needs of its machine and its user: command line, files, peers, console."""
