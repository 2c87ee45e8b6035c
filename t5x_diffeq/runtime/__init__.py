"""What a process needs from its machine and its user: command line, files, peers, console."""
