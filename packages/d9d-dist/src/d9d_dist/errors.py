"""Exceptions that the command line distinguishes from bugs: invalid user input, and ranks that do not start."""

from collections.abc import Mapping, Sequence


class UserError(ValueError):
    """Invalid input or configuration, usually found before the job starts.

    The message names the value, the expected values and a remedy. `d9d_loop.cli_main` prints it without a traceback
    and exits with code 2.
    """


class StartupTimeoutError(RuntimeError):
    """Failed start of a job: ranks did not start in time, or the job's store is unreachable; the message names them.

    `d9d_loop.cli_main` prints it without a traceback and exits with code 124.
    """


def refuse_listed(what: str, sections: Mapping[str, Sequence[str]]) -> None:
    """Raise a `UserError` with the entries of each section under its title; return if all sections are empty."""
    lines = [
        line
        for title, entries in sections.items()
        if entries
        for line in (f"  {title}:", *(f"    {entry}" for entry in entries))
    ]
    if lines:
        raise UserError(f"{what}:\n" + "\n".join(lines))
