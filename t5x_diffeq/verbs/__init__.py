"""What the verbs do once their flags are checked; each file belongs to the verb of its name."""
