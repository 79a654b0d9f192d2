import tracemalloc
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from d9d_dist import UserError
from d9d_loop.data.sample_order import SampleOrder

SEEDS = st.integers(0, 2**63)


def _epoch(order: SampleOrder, length: int, epoch: int = 0) -> list[int]:
    return [order[epoch * length + index] for index in range(length)]


@given(length=st.integers(1, 700), seed=SEEDS, epoch=st.integers(0, 10**6))
def test_an_epoch_is_a_permutation(length: int, seed: int, epoch: int) -> None:
    order = SampleOrder(length, seed=seed)
    assert sorted(_epoch(order, length, epoch)) == list(range(length))


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 15, 16, 17, 255, 256, 257, 4095, 4096, 4097])
def test_an_epoch_is_a_permutation_around_powers_of_two(length: int) -> None:
    assert sorted(_epoch(SampleOrder(length, seed=1), length)) == list(range(length))


@given(length=st.integers(1, 10**15), seed=SEEDS, position=st.integers(0, 10**18))
def test_sample_indices_are_below_the_length(length: int, seed: int, position: int) -> None:
    assert 0 <= SampleOrder(length, seed=seed)[position] < length


@given(length=st.integers(1, 100), seed=SEEDS, position=st.integers(0, 10**9))
def test_unshuffled_samples_are_in_the_order_of_the_data(length: int, seed: int, position: int) -> None:
    assert SampleOrder(length, seed=seed, shuffle=False)[position] == position % length


def test_epochs_and_seeds_differ() -> None:
    length = 100
    epochs: list[Any] = [_epoch(SampleOrder(length, seed=seed), length, epoch) for seed in (0, 1) for epoch in range(3)]
    for position, one in enumerate(epochs):
        for other in epochs[:position]:
            # Two random permutations agree in one place on average.
            assert sum(x == y for x, y in zip(one, other, strict=True)) < 10


def test_neighbors_are_separated() -> None:
    length = 10_000
    order = _epoch(SampleOrder(length, seed=0), length)
    distances = [abs(x - y) for x, y in pairwise(order)]
    assert 0.3 < sum(distances) / len(distances) / length < 0.37  # random permutations: a third
    assert sum(distance == 1 for distance in distances) < 10  # random permutations: about two


def test_the_sample_order_is_the_same_on_every_machine() -> None:
    assert _epoch(SampleOrder(10, seed=7), 10) == [4, 0, 7, 5, 2, 1, 6, 3, 8, 9]


def test_a_sample_order_takes_constant_memory() -> None:
    tracemalloc.start()
    try:
        order = SampleOrder(10**12, seed=0)
        assert len({order[position] for position in range(0, 10**12, 10**10)}) == 100
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


@settings(max_examples=40)
@given(
    length=st.sampled_from([1, 5, 300, 5000, 10**12, 2**40, 2**40 + 1, 2**62]),
    seed=SEEDS,
    start=st.integers(0, 10**18),
    count=st.integers(0, 700),
    shuffle=st.booleans(),
)
def test_batched_queries_agree(*, length: int, seed: int, start: int, count: int, shuffle: bool) -> None:
    order = SampleOrder(length, seed=seed, shuffle=shuffle)
    assert order.take(start, start + count) == [order[position] for position in range(start, start + count)]


def test_batched_queries_cross_epochs() -> None:
    order = SampleOrder(1000, seed=2)
    assert order.take(900, 3300) == [order[position] for position in range(900, 3300)]


@pytest.mark.parametrize("length", [0, -1, 2**62 + 1])
def test_refuses_lengths_out_of_range(length: int) -> None:
    with pytest.raises(UserError, match=rf"got {length} samples; expected 1 to 2\^62"):
        SampleOrder(length, seed=0)


def _chi_squared(counts: torch.Tensor) -> float:
    """Return the chi-squared statistic's deviation from its mean in standard deviations, for equally likely cells."""
    expected = counts.sum() / counts.numel()
    freedom = counts.numel() - 1
    return float(((counts - expected).square() / expected).sum() - freedom) / (2 * freedom) ** 0.5


@pytest.mark.parametrize("seed", [0, 1])
def test_samples_are_uniform_and_independent_of_position_and_of_their_neighbors(seed: int) -> None:
    length, cells, count = 10**12, 16, 200_000
    order = torch.tensor(SampleOrder(length, seed=seed).take(3 * 10**11, 3 * 10**11 + count))
    cell = order * cells // length
    place = torch.arange(count) % cells
    for coarse in (cell, cells * cell[1:] + cell[:-1], cells * cell[16:] + cell[:-16], cells * cell + place):
        assert abs(_chi_squared(torch.bincount(coarse, minlength=int(coarse.max()) + 1).double())) < 4.5
    low = order % cells  # the low bits too
    assert abs(_chi_squared(torch.bincount(cells * low[1:] + low[:-1]).double())) < 4.5


def test_all_orders_of_few_samples_are_equally_likely() -> None:
    order = SampleOrder(4, seed=0)
    found = Counter(tuple(order[epoch * 4 + index] for index in range(4)) for epoch in range(12_000))
    assert len(found) == 24
    assert abs(_chi_squared(torch.tensor(list(found.values())).double())) < 4.5


@pytest.mark.slow
def test_samples_at_a_position_are_uniform_over_epochs() -> None:
    order = SampleOrder(400, seed=0)
    cells = torch.tensor([order.take(epoch * 400, (epoch + 1) * 400) for epoch in range(300)]) // 20
    for position in (0, 200, 399):
        assert abs(_chi_squared(torch.bincount(cells[:, position], minlength=20).double())) < 4.5
