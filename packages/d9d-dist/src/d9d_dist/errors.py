"""Exceptions that the command line distinguishes from bugs: invalid user input, and ranks that do not start."""

import errno
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_args


class UserError(ValueError):
    """Invalid input or configuration, usually found before the job starts.

    The message names the value, the expected values and a remedy. `d9d_loop.cli_main` prints it without a traceback
    and exits with code 2.
    """


_MAY_PASS = (errno.EROFS, errno.ESTALE, errno.EIO, errno.ENOTCONN, errno.ETIMEDOUT, errno.EHOSTDOWN, errno.ENODEV)


def may_pass(error: OSError) -> bool:
    """Return True for an error of a disk or mount, not of the user: a restart may help, so it is not a `UserError`."""
    return error.errno in _MAY_PASS


class AddressInUseError(RuntimeError):
    """Failed start of a job: another process has the port of the job's store, such as an earlier job that still ends.

    A restart may help, so it is not a `UserError`. `d9d_loop.cli_main` prints it without a traceback, and exits with 1.
    """


class StartupTimeoutError(RuntimeError):
    """Failed start of a job: ranks did not start in time, or the job's store is unreachable; the message names them.

    `d9d_loop.cli_main` prints it without a traceback and exits with code 124.
    """


def shorten(names: Iterable[object], most: int = 8) -> str:
    """Format names for a message: the first `most`, and the number of further ones."""
    shown = list(map(str, names))
    return (", ".join(shown[:most]) or "none") + (f" and {len(shown) - most} more" if shown[most:] else "")


def check_choice(name: str, value: object, choices: Any) -> None:
    """Raise a `UserError` unless an argument is one of the values of its `Literal` type."""
    if value not in get_args(choices):
        raise UserError(f"{name} = {value!r}; expected one of {', '.join(get_args(choices))}.")


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
