import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from d9d_loop.data import best_fit_decreasing


def _one_by_one(lengths: list[int], capacity: int) -> list[int]:
    """Return the free space of each row by textbook best-fit decreasing."""
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [number for number, room in enumerate(rooms) if room >= length]
        if fitting:
            rooms[min(fitting, key=lambda number: rooms[number])] -= length
        else:
            rooms.append(capacity - length)
    return rooms


@given(data=st.data(), capacity=st.integers(1, 60))
def test_packing_equals_textbook_best_fit_decreasing(data: st.DataObject, capacity: int) -> None:
    lengths = data.draw(st.lists(st.integers(1, capacity), max_size=80))
    rows = best_fit_decreasing(lengths, capacity)
    assert sorted(item for row in rows for item in row) == list(range(len(lengths)))
    rooms = [capacity - sum(lengths[item] for item in row) for row in rows]
    # Rows with equal free space are equivalent, so either may take an item.
    assert sorted(rooms) == sorted(_one_by_one(lengths, capacity))


@pytest.mark.parametrize("capacity", [2048, 4096, 8192])
def test_log_normal_lengths_have_little_padding(capacity: int) -> None:
    draws = random.Random(0)  # noqa: S311
    lengths = [min(max(int(draws.lognormvariate(6, 1)), 1), capacity) for _ in range(20_000)]
    rows = best_fit_decreasing(lengths, capacity)
    assert 1 - sum(lengths) / (len(rows) * capacity) <= 0.001


def test_without_documents_there_are_no_rows() -> None:
    assert best_fit_decreasing([], 5) == []
