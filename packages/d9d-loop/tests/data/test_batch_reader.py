import random
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from d9d_dist import UserError
from d9d_loop.data import DataError, IndexedStream
from d9d_loop.data.batch_reader import BatchReader, check_draws_nothing, read_batch, seed_sample
from d9d_loop.data.worker_pool import ReadJob
from d9d_loop.isolation import restored_random


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
        IndexedStream(_Squares(), seed=0),
        default_collate,
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


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        (None, r"sample 2 \(position 2 of the global order\) is None; expected a value"),
        ({"value": None}, r"\['value'\] of sample 2 \(position 2 of the global order\) is None"),
    ],
)
def test_a_sample_that_is_none_is_named(missing: Any, message: str) -> None:
    samples = [{"value": 0}, {"value": 1}, missing, {"value": 3}]
    stream, job = IndexedStream(samples, seed=0), ReadJob(0, [0, 1, 2, 3])
    with pytest.raises(DataError, match=rf"the 4 samples from sample 0 .* could not be collated: .*\. {message}"):
        read_batch(stream, default_collate, job)
    kept = read_batch(stream, lambda each: default_collate([one for one in each if one is not missing]), job)
    assert len(kept["value"]) == 3


def test_reading_batches_does_not_change_the_random_state_of_the_model() -> None:
    before = torch.get_rng_state()
    list(_reader(0))
    assert torch.equal(torch.get_rng_state(), before)


class _Augmented:
    """Data with draws of all three global generators."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([torch.rand(()).item(), random.random(), np.random.rand()])  # noqa: S311


def _with_noise(samples: list[torch.Tensor]) -> list[torch.Tensor]:
    return [*samples, torch.rand(4)]


@pytest.mark.parametrize(("size", "num_workers"), [(1, 0), (4, 0), (12, 0), (3, 2)])
def test_draws_of_a_sample_depend_only_on_its_position(size: int, num_workers: int) -> None:
    jobs = [ReadJob(start, list(range(start, start + size))) for start in range(0, 12, size)]

    def read(jobs: list[ReadJob], num_workers: int) -> list[list[torch.Tensor]]:
        stream, place, device = IndexedStream(_Augmented(), seed=0), (lambda batch: batch), torch.device("cpu")
        with closing(
            BatchReader(stream, _with_noise, iter(jobs), seed=7, place=place, device=device, num_workers=num_workers)
        ) as batches:
            return list(batches)

    alone = [batch[0] for batch in read([ReadJob(number, [number]) for number in range(12)], 0)]
    found = read(jobs, num_workers)
    assert torch.equal(torch.stack([sample for batch in found for sample in batch[:-1]]), torch.stack(alone))
    assert len({tuple(sample.tolist()) for sample in alone}) == 12
    # The numbers of `collate` are independent of those of its samples.
    assert all(abs(batch[-1][0] - batch[0][0]) > 1e-6 for batch in found)


def _draw() -> tuple[float, float, float]:
    return random.random(), torch.rand(()).item(), float(np.random.rand())  # noqa: S311


def test_random_streams_depend_on_seed_and_position_only() -> None:
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    expected = [_draw() for _ in range(2)]
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    drawn = [_draw()]
    streams = []
    for seed, position in ((0, 0), (0, 1), (1, 0), (1, 1), (0, 0)):
        with restored_random():
            seed_sample(seed, position)
            streams.append(_draw())
    assert [*drawn, _draw()] == expected
    assert streams[0] == streams[-1]
    for values in zip(*streams[:4], strict=True):
        assert len(set(values)) == 4


def test_a_position_has_the_same_stream_in_any_process() -> None:
    with restored_random():
        seed_sample(1, 8)
        drawn = _draw()
        torch.manual_seed(3)
        seed_sample(1, 8)
        assert _draw() == drawn
        seed_sample(1, 9)
        assert _draw() != drawn


@pytest.mark.parametrize(
    ("draw", "name"),
    [(random.random, "Python"), (np.random.rand, "NumPy"), (lambda: torch.rand(()), "torch")],
    ids=["python", "numpy", "torch"],
)
def test_undeclared_random_draws_are_detected(draw: Callable[[], object], name: str) -> None:
    check_draws_nothing(lambda: torch.rand((), generator=torch.Generator()))
    with pytest.raises(
        UserError, match=f"drew random numbers from {name}; expected none, because the data provider has"
    ):
        check_draws_nothing(draw)


def test_draws_of_other_threads_are_ignored() -> None:
    draws = iter([random.random, object])

    def read() -> None:
        next(draws)()

    check_draws_nothing(read)
