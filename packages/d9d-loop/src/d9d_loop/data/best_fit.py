"""Best-fit decreasing bin packing, fast enough to be done by every rank for all: a group of equal lengths at a time."""

from collections.abc import Sequence


def best_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Pack items into as few rows as best-fit decreasing needs.

    The longest item is placed first, each into the row with the least room that it fits into, and into a new row where
    it fits into none (Johnson: "Near-optimal bin packing algorithms", 1973; "Fewer Truncations Improve Language
    Modeling", arXiv:2404.10830, for documents). Rows with equal room are alike, and so are items of one length: they
    are placed together, as many as there are of both, and the least room that is large enough is found in a bit set. So
    what counts is the number of different lengths.

    Args:
        lengths: Length of each item, from 1 to `capacity`.
        capacity: Length of a row.

    Returns:
        For each row the numbers of its items, the longest first; a function of the arguments alone.
    """
    items_of: list[list[int]] = [[] for _ in range(capacity + 1)]  # by length
    for item, length in enumerate(lengths):
        items_of[length].append(item)
    rows: list[list[int]] = []
    rows_with: list[list[list[int]]] = [[] for _ in range(capacity + 1)]  # by room that is left
    rooms = 0  # the bit of each room that a row has
    assert not items_of[0]
    for length in range(capacity, 0, -1):
        items = items_of[length]
        while items:
            if large_enough := rooms >> length:
                room = length + (large_enough & -large_enough).bit_length() - 1
                candidates = rows_with[room]
            else:
                room, candidates = capacity, rows_with[capacity]
                candidates += ([] for _ in range(max(len(items) // (capacity // length), 1)))
                rows += candidates
                rooms |= 1 << capacity
            # A row that takes an item has the least room of all from then on, as long as another fits.
            each = min(room // length, len(items))
            chosen = candidates[-(len(items) // each) :]
            for number, row in enumerate(chosen):
                row.extend(items[number * each : (number + 1) * each])
            del candidates[-len(chosen) :], items[: len(chosen) * each]
            if not candidates:
                rooms ^= 1 << room
            rows_with[room - each * length] += chosen
            rooms |= 1 << (room - each * length)
    return rows
