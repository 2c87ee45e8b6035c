"""The two ways in which a verb fails with one clear line (see `command_line`)."""


class InputError(ValueError):
    """The arguments, the config or the input can't be used: exit status 2.

    The message is one line that names the key, the value and the way out.
    """


class RunError(RuntimeError):
    """The run failed after it had started well: exit status 1."""
