"""Text with its loss mask, for people to read."""

from collections.abc import Sequence

Span = tuple[int, int]
"""Characters [start, stop) of a text."""

_GREEN, _DIM, _RESET = "\033[1;32m", "\033[2m", "\033[0m"


def mark_spans(text: str, spans: Sequence[Span], *, in_color: bool = False) -> str:
    """Return the text with its spans in brackets, or in green with the other parts dimmed.

    Args:
        text: The text.
        spans: Parts of the text that contribute to the loss, in ascending order.
        in_color: If True, use colors of a terminal instead of the brackets ⟦ ⟧.
    """
    around, rest = (f"{_GREEN}{{}}{_RESET}", f"{_DIM}{{}}{_RESET}") if in_color else ("⟦{}⟧", "{}")
    parts: list[str] = []
    before = 0
    for start, stop in spans:
        parts += [rest.format(text[before:start])] if start > before else []
        parts.append(around.format(text[start:stop]))
        before = stop
    parts += [rest.format(text[before:])] if before < len(text) else []
    return "".join(parts)
