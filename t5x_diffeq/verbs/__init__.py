"""The work of each verb, after its flags are checked, in a file of its name."""
