"""Exception for invalid user input, which a command line distinguishes from a bug."""


class UserError(ValueError):
    """Invalid input or configuration, usually found before the job starts.

    The message names the value, the expected values and a remedy. `d9d_loop.cli_main` prints it without a traceback
    and exits with code 2.
    """
