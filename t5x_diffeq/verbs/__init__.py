"""What the verbs do once their flags are checked: each file is the work of the verb of its name."""
