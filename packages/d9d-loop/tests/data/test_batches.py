from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import default_collate

from d9d_loop import SampleOrder
from d9d_loop.data.batches import EvaluationBatches, TrainBatches, batch_loader

SMALL = st.integers(1, 5)


def _train(order: SampleOrder, *, steps: range, microbatches: int, size: int, ranks: int) -> list[list[list[int]]]:
    """Return the microbatches of each rank."""
    return [
        list(
            TrainBatches(
                order,
                first_step=steps.start,
                num_steps=steps.stop,
                num_microbatches=microbatches,
                microbatch_size=size,
                dp_rank=rank,
                dp_size=ranks,
            )
        )
        for rank in range(ranks)
    ]


@given(
    length=st.integers(1, 50),
    seed=st.integers(0, 9),
    first=st.integers(0, 9),
    microbatches=SMALL,
    size=SMALL,
    ranks=SMALL,
    shuffle=st.booleans(),
)
def test_the_ranks_of_a_step_share_out_a_slice_of_the_global_order(
    *, length: int, seed: int, first: int, microbatches: int, size: int, ranks: int, shuffle: bool
) -> None:
    order = SampleOrder(length, seed=seed, shuffle=shuffle)
    batches = _train(order, steps=range(first, first + 3), microbatches=microbatches, size=size, ranks=ranks)
    total = microbatches * size * ranks
    for step in range(3):
        cells = [rank[step * microbatches : (step + 1) * microbatches] for rank in batches]
        assert {len(samples) for rank in cells for samples in rank} == {size}
        together = [sample for microbatch in zip(*cells, strict=True) for samples in microbatch for sample in samples]
        start = (first + step) * total
        assert together == [order[position] for position in range(start, start + total)]
    assert {len(rank) for rank in batches} == {3 * microbatches}


def test_a_job_that_is_done_has_no_batches() -> None:
    assert _train(SampleOrder(9, seed=0), steps=range(4, 4), microbatches=2, size=1, ranks=2) == [[], []]


@given(num_samples=st.integers(1, 60), batch_size=SMALL, ranks=SMALL)
def test_evaluation_counts_every_sample_once_in_equally_many_batches(
    num_samples: int, batch_size: int, ranks: int
) -> None:
    of_ranks = [
        EvaluationBatches(
            data_size=num_samples, num_samples=num_samples, batch_size=batch_size, dp_rank=rank, dp_size=ranks
        )
        for rank in range(ranks)
    ]
    counted = [samples for batches in of_ranks for samples in list(batches)[: batches.num_real]]
    assert sorted(sample for samples in counted for sample in samples) == list(range(num_samples))
    assert max(map(len, counted)) <= batch_size
    assert len({len(list(batches)) for batches in of_ranks}) == 1
    extra = [samples for batches in of_ranks for samples in list(batches)[batches.num_real :]]
    assert all(samples == [0] for samples in extra)
    assert len(extra) < ranks


def test_evaluation_samples_are_spread_over_the_data() -> None:
    batches = EvaluationBatches(data_size=10, num_samples=4, batch_size=3, dp_rank=0, dp_size=1)
    assert list(batches) == [[0, 2, 5], [7]]


class _Squares:
    """Map-style data without torch."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"value": torch.tensor(index * index)}


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_loader_reads_the_batches_in_order(num_workers: int) -> None:
    batches = EvaluationBatches(data_size=5, num_samples=5, batch_size=2, dp_rank=0, dp_size=1)
    loader = batch_loader(_Squares(), batches, collate=default_collate, num_workers=num_workers, pin_memory=False)
    assert [batch["value"].tolist() for batch in loader] == [[0, 1], [4, 9], [16]]


def test_a_loader_leaves_the_random_numbers_of_training_alone() -> None:
    batches = EvaluationBatches(data_size=5, num_samples=5, batch_size=2, dp_rank=0, dp_size=1)
    before = torch.get_rng_state()
    list(batch_loader(_Squares(), batches, collate=list, num_workers=0, pin_memory=False))
    assert torch.equal(torch.get_rng_state(), before)
