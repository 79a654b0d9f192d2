"""Fold rows of numbers into ranges: (0, 0), (1, 1), (2, 2) becomes the row `{0..2}`, `{0..2}`."""

from collections.abc import Sequence
from math import prod


def folded_rows(rows: Sequence[tuple[int, ...]]) -> list[tuple[list[str], int]]:
    """Fold rows of numbers into rows of range strings such as `{0..2}`, each with the number of rows that it covers.

    Within a row, ranges of equal length advance together; ranges of different lengths form all combinations. Rows that
    cannot be expressed this way are split into several folded rows.
    """
    columns = list(zip(*rows, strict=True))
    leaders = _leaders(columns)
    counting = sorted({leader for leader in leaders if len(set(columns[leader])) > 1})
    values = {leader: sorted(set(columns[leader])) for leader in counting}
    lengths = [len(each) for each in values.values()]
    if prod(lengths) != len(rows) or len(set(lengths)) != len(lengths):
        first = columns[counting[0]]
        parts = [
            [row for row, value in zip(rows, first, strict=True) if value == each] for each in dict.fromkeys(first)
        ]
        return [folded for part in parts for folded in folded_rows(part)]
    texts = []
    for column, leader in zip(columns, leaders, strict=True):
        shift = column[0] - columns[leader][0]
        texts.append(_range([value + shift for value in values.get(leader, [columns[leader][0]])]))
    return [(texts, len(rows))]


def _leaders(columns: Sequence[Sequence[int]]) -> list[int]:
    """Return for each column the index of the first column that differs from it by a constant."""
    found: dict[tuple[int, ...], int] = {}
    return [found.setdefault(tuple(value - column[0] for value in column), at) for at, column in enumerate(columns)]


def _range(values: Sequence[int]) -> str:
    """Format ascending numbers: `7`, or `{0..3,7}`."""
    runs: list[list[int]] = []
    for value in values:
        if runs and value == runs[-1][-1] + 1:
            runs[-1].append(value)
        else:
            runs.append([value])
    if len(values) == 1:
        return str(values[0])
    return "{" + ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}..{run[-1]}" for run in runs) + "}"
