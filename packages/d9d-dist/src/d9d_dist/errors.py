"""The exception that means "you asked for something impossible", so that a command line can tell it from a bug."""


class UserError(ValueError):
    """A mistake in what was asked for, found before anything started.

    The message says what was got, what was expected and what to do. `d9d_loop.command_line` prints it without a
    traceback and exits with code 2; everywhere else it is an ordinary `ValueError`.
    """
