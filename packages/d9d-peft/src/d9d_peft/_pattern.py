"""What the methods share that choose modules by a pattern: checking it, and telling a person what there is to match."""

import re

from d9d_dist import UserError

_NAMES_SHOWN = 8


def check_pattern(pattern: str, method: str) -> None:
    """Refuse what is no regular expression.

    Raises:
        UserError: Naming the method, the pattern and what is wrong with it.
    """
    try:
        re.compile(pattern)
    except re.error as error:
        raise UserError(f"{method} got the pattern {pattern!r}, which is no regular expression: {error}.") from error


def shorten(names: list[str]) -> str:
    """A list of names for a message: the first few, and how many more there are."""
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return (", ".join(names[:_NAMES_SHOWN]) or "none") + more
