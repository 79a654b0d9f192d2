"""Best-fit decreasing bin packing, which places items of equal length together. Fast enough to run on every rank."""

from collections.abc import Sequence


def best_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Pack items into rows by best-fit decreasing, and return the item indices of each row. Deterministic.

    Items are placed in descending order of length, each into the row with the least sufficient free space, or into a
    new row (Johnson: "Near-optimal bin packing algorithms", 1973; for documents: "Fewer Truncations Improve Language
    Modeling", arXiv:2404.10830). Rows with equal free space are interchangeable, and so are items of equal length. So a
    group of items is placed into a group of rows at once. The number of these placements depends mostly on the number
    of distinct lengths.
    """
    items_of: list[list[int]] = [[] for _ in range(capacity + 1)]  # by length
    for item, length in enumerate(lengths):
        items_of[length].append(item)
    rows: list[list[int]] = []
    rows_with: list[list[list[int]]] = [[] for _ in range(capacity + 1)]  # by free space
    rooms = 0  # bit set: bit r is set if a row has free space r
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
            # A row that took an item remains the best fit for the next items of this length, until it is full.
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
