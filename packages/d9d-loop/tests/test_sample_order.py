import tracemalloc
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from d9d_loop import SampleOrder

SEEDS = st.integers(0, 2**63)


def _epoch(order: SampleOrder, length: int, epoch: int = 0) -> list[int]:
    return [order[epoch * length + index] for index in range(length)]


@settings(deadline=None)
@given(length=st.integers(1, 700), seed=SEEDS, epoch=st.integers(0, 10**6))
def test_an_epoch_is_a_permutation(length: int, seed: int, epoch: int) -> None:
    order = SampleOrder(length, seed=seed)
    assert sorted(_epoch(order, length, epoch)) == list(range(length))


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 15, 16, 17, 255, 256, 257, 4095, 4096, 4097])
def test_an_epoch_is_a_permutation_around_powers_of_two(length: int) -> None:
    assert sorted(_epoch(SampleOrder(length, seed=1), length)) == list(range(length))


@given(length=st.integers(1, 10**15), seed=SEEDS, position=st.integers(0, 10**18))
def test_a_position_has_a_sample_of_the_data(length: int, seed: int, position: int) -> None:
    assert 0 <= SampleOrder(length, seed=seed)[position] < length


@given(length=st.integers(1, 100), seed=SEEDS, position=st.integers(0, 10**9))
def test_without_shuffling_it_goes_through_the_data_in_order(length: int, seed: int, position: int) -> None:
    assert SampleOrder(length, seed=seed, shuffle=False)[position] == position % length


def test_epochs_and_seeds_differ() -> None:
    length = 100
    epochs: list[Any] = [_epoch(SampleOrder(length, seed=seed), length, epoch) for seed in (0, 1) for epoch in range(3)]
    for position, one in enumerate(epochs):
        for other in epochs[:position]:
            # Two random permutations agree in one place on average.
            assert sum(x == y for x, y in zip(one, other, strict=True)) < 10


def test_neighbours_are_torn_apart() -> None:
    length = 10_000
    order = _epoch(SampleOrder(length, seed=0), length)
    distances = [abs(x - y) for x, y in pairwise(order)]
    assert 0.3 < sum(distances) / len(distances) / length < 0.37  # a third, for random numbers
    assert sum(distance == 1 for distance in distances) < 10  # two, for random numbers


def test_is_the_same_on_every_machine() -> None:
    assert _epoch(SampleOrder(10, seed=7), 10) == [4, 0, 7, 5, 2, 1, 6, 3, 8, 9]


def test_takes_constant_memory() -> None:
    tracemalloc.start()
    try:
        order = SampleOrder(10**12, seed=0)
        assert len({order[position] for position in range(0, 10**12, 10**10)}) == 100
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()
