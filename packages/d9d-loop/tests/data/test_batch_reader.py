from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
import torch
from torch.utils.data import default_collate

from d9d_loop.data import EvenlySpacedStream
from d9d_loop.data.batch_reader import BatchReader
from d9d_loop.data.sample_reader import ReadJob, SampleReader


class _Squares:
    """Data by index, without anything of torch."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"value": torch.tensor(index * index), "drawn": torch.rand(())}


def _jobs() -> Iterator[ReadJob]:
    return iter([ReadJob(0, [0, 1]), ReadJob(2, [2, 3]), ReadJob(4, [4])])


def _reader(num_workers: int) -> BatchReader:
    return BatchReader(
        SampleReader(EvenlySpacedStream(_Squares()), default_collate),
        _jobs(),
        seed=0,
        place=lambda batch: {**batch, "is_placed": True},
        device=torch.device("cpu"),
        num_workers=num_workers,
    )


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_reads_the_batches_in_order_and_ends(num_workers: int) -> None:
    with closing(_reader(num_workers)) as batches, closing(_reader(0)) as here:
        read = list(batches)
        assert [batch["value"].tolist() for batch in read] == [[0, 1], [4, 9], [16]]
        assert all(batch["is_placed"] for batch in read)
        assert [batch["drawn"].tolist() for batch in read] == [batch["drawn"].tolist() for batch in here]
        assert next(batches, None) is None


def test_reading_batches_does_not_change_the_random_state_of_the_model() -> None:
    before = torch.get_rng_state()
    list(_reader(0))
    assert torch.equal(torch.get_rng_state(), before)
