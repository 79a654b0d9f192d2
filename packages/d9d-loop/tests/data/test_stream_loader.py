import random
import threading
from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest
import torch
from example_streams import CountedEpochs, lists_stream, through_json
from hypothesis import given, settings
from hypothesis import strategies as st

from d9d_dist import UserError
from d9d_loop.data import (
    BucketedStream,
    DataError,
    IndexedStream,
    IteratedStream,
    MixtureStream,
    PackedStream,
    Phase,
    SampleStream,
    Share,
    ShuffledStream,
    StreamLoader,
    TokenizedStream,
)
from d9d_loop.data.sample_order import SampleOrder
from d9d_loop.data.stream_loader import plan_steps
from d9d_loop.data.worker_pool import ReadJob

GLOBAL_SIZE = 12
SHARES = [  # (microbatch size, microbatches, ranks) with the same global size
    (12, 1, 1),
    (6, 1, 2),
    (2, 3, 2),
    (1, 3, 4),
    (1, 2, 6),
    (4, 1, 3),
    (1, 1, 12),
    (3, 4, 1),
]

SOURCES: list[Callable[[int], SampleStream]] = [
    lambda seed: lists_stream(17, seed=seed),
    lambda seed: IteratedStream(CountedEpochs, name=f"numbers {seed}"),
]
WRAPPERS: list[Callable[[SampleStream, int], SampleStream]] = [
    lambda stream, seed: ShuffledStream(stream, window=7, seed=seed),
    lambda stream, seed: BucketedStream(stream, group_size=3, num_groups=5, seed=seed),
    lambda stream, seed: MixtureStream({"a": stream, "b": lists_stream(5)}, weights={"a": 2, "b": 1}, seed=seed),
    lambda stream, seed: MixtureStream(
        {"a": stream, "b": SOURCES[1](seed)},
        weights=[Phase({"a": 1}), Phase({"b": 1}, 9, ramp=40)],
        unit="tokens",
        seed=seed,
    ),
]
PACKED: Callable[[SampleStream, int], SampleStream] = lambda stream, seed: PackedStream(  # noqa: E731
    TokenizedStream(stream, lambda tokens: tokens, max_length=8, window=5), row_length=8, window=11, seed=seed
)


@st.composite
def streams(draw: st.DrawFn) -> SampleStream:
    stream = draw(st.sampled_from(SOURCES))(draw(st.integers(0, 9)))
    for wrapper in draw(st.lists(st.sampled_from(WRAPPERS), max_size=3)):
        stream = wrapper(stream, draw(st.integers(0, 9)))
    return PACKED(stream, draw(st.integers(0, 9))) if draw(st.booleans()) else stream


def _plain(sample: Any) -> Any:
    """Convert a sample to a comparable value."""
    return {key: value.tolist() for key, value in sample.items()} if isinstance(sample, dict) else sample


def _loader(stream: SampleStream, share: tuple[int, int, int], rank: int, **more: Any) -> StreamLoader:
    size, num_microbatches, dp_size = share
    return StreamLoader(stream, Share(size, num_microbatches, rank, dp_size), seed=0, collate=list, **more)


def _steps(loaders: list[StreamLoader], count: int) -> list[Any]:
    """Return the samples of steps in the global order, merged from all ranks."""
    samples: list[Any] = []
    for _ in range(count):
        of_ranks = [next(loader) for loader in loaders]
        for microbatches in zip(*of_ranks, strict=True):
            samples += [_plain(sample) for batch in microbatches for sample in batch]
    return samples


@settings(max_examples=30)
@given(stream=streams(), cuts=st.lists(st.tuples(st.integers(0, 3), st.sampled_from(SHARES)), min_size=1, max_size=4))
def test_a_job_resumes_with_the_global_order_on_any_number_of_ranks(
    stream: SampleStream, cuts: list[tuple[int, tuple[int, int, int]]]
) -> None:
    total = sum(count for count, _ in cuts)
    expected = [_plain(stream.read(entry)) for entry in stream.cursor().take(total * GLOBAL_SIZE)]
    state, seen = None, []
    for count, share in cuts:  # the job is interrupted after each, and resumes in another layout
        loaders = [_loader(stream, share, rank) for rank in range(share[2])]
        for loader in loaders:
            if state is not None:
                loader.load_state_dict(state)
        seen += _steps(loaders, count)
        states = [through_json(loader.state_dict()) for loader in loaders]
        assert all(other == states[0] for other in states)
        state = states[0]
    assert seen == expected


@pytest.mark.parametrize("rank", range(3))
def test_a_rank_reads_consecutive_samples_of_each_microbatch(rank: int) -> None:
    order, size, num_microbatches, num_ranks = SampleOrder(10, seed=3), 4, 2, 3
    expected = [
        [order[position] for position in range(cell * size, (cell + 1) * size)]
        for step in range(2, 6)
        for microbatch in range(num_microbatches)
        for cell in [(step * num_microbatches + microbatch) * num_ranks + rank]
    ]
    loader = _loader(IndexedStream(range(10), seed=3), (size, num_microbatches, num_ranks), rank)
    loader.load_state_dict({"position": 48, "stream": {"position": 48}})
    assert [batch for _ in range(4) for batch in next(loader)] == expected


@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.slow("2")
def test_prefetched_samples_are_not_lost(num_workers: int) -> None:
    stream = PACKED(lists_stream(17), 1)
    expected = _steps([_loader(stream, (3, 2, 2), rank) for rank in range(2)], 8)
    seen: list[Any] = []
    state = None
    for count in (1, 3, 4):
        loaders = [_loader(stream, (3, 2, 2), rank, num_workers=num_workers, prefetch=3) for rank in range(2)]
        for loader in loaders:
            if state is not None:
                loader.load_state_dict(state)
        seen += _steps(loaders, count)
        state = through_json(loaders[0].state_dict())
        for loader in loaders:
            loader.close()
    assert seen == expected


@given(
    data_size=st.integers(1, 60),
    num_samples=st.none() | st.integers(1, 70),
    sizes=st.tuples(st.integers(1, 5), st.integers(1, 3), st.integers(1, 5)),
    epochs=st.integers(1, 2),
)
def test_every_sample_is_planned_once_in_equally_many_jobs(
    data_size: int, num_samples: int | None, sizes: tuple[int, int, int], epochs: int
) -> None:
    size, num_microbatches, num_ranks = sizes
    stream = IndexedStream(range(data_size), seed=3, epochs=epochs)
    shares = [Share(size, num_microbatches, rank, num_ranks) for rank in range(num_ranks)]
    of_ranks = [list(plan_steps(stream.cursor(), share, num_samples=num_samples)) for share in shares]
    order, position = SampleOrder(data_size, seed=3).take(0, epochs * data_size)[:num_samples], 0
    for steps in zip(*of_ranks, strict=True):
        ((num_in_step, *_),) = [{found for _, _, found in steps}]
        expected = order[position : position + num_in_step]
        jobs = [job for found, num_own, _ in steps for job in found[:num_own]]
        jobs.sort(key=lambda job: job.position)
        assert [entry for job in jobs for entry in job.entries] == expected
        assert [job.position for job in jobs] == list(range(position, position + num_in_step, size))
        assert {len(job.entries) for job in jobs[:-1]} <= {size}
        assert {len(found) for found, _, _ in steps} == {num_microbatches}
        stand_ins = [job for found, num_own, _ in steps for job in found[num_own:]]
        assert all(job == ReadJob(position, expected[:1]) for job in stand_ins)
        position += num_in_step
    assert position == len(order)
    assert len(of_ranks[0]) == sum(
        -(-len(order[start : start + data_size]) // shares[0].global_size) for start in range(0, len(order), data_size)
    )


class _Draws:
    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, random.random(), torch.rand(()).item()])  # noqa: S311


def test_random_samples_depend_only_on_seed_and_position() -> None:
    stream = IndexedStream(_Draws(), seed=0)

    def draws(share: Share, **more: Any) -> torch.Tensor:
        with StreamLoader(stream, share, seed=4, **more) as loader:
            return torch.cat([batch for _ in range(4) for batch in next(loader)])

    whole = draws(Share(2, 4))
    before = torch.get_rng_state()
    assert torch.equal(draws(Share(2, 4)), whole)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(draws(Share(2, 4), num_workers=2), whole)
    ranks = [draws(Share(2, 2, rank, 2)).view(4, 2, 2, 3) for rank in range(2)]
    assert torch.equal(torch.stack(ranks, dim=2).view(-1, 3), whole)
    assert not torch.equal(whole[:, 1:].unique(dim=0), whole[:1, 1:])


def test_batches_are_placed_by_the_prefetch_thread_if_there_are_workers() -> None:
    for num_workers in (0, 1):
        names: list[str] = []

        def place(batch: Any, names: list[str] = names) -> Any:
            names.append(threading.current_thread().name)
            return ("placed", batch)

        with _loader(lists_stream(), (2, 1, 1), 0, place=place, num_workers=num_workers) as loader:
            assert next(loader)[0][0] == "placed"
        assert (names[0] == "d9d-data-prefetch") == bool(num_workers)


class _BrokenAt7:
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> int:
        if index == 7:
            raise OSError("the disk is gone")
        return index


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_error_is_raised_at_its_step_and_ends_the_workers(num_workers: int) -> None:
    stream = IndexedStream(_BrokenAt7(), seed=0, shuffle=False)
    loader = _loader(stream, (2, 2, 1), 0, num_workers=num_workers)
    assert next(loader) == [[0, 1], [2, 3]]
    for _ in range(2):  # a second iterator starts at the same step
        with pytest.raises(
            DataError, match=r"sample 7 \(position 7 of the global order\) could not be read: OSError: the d"
        ):
            next(loader)
    assert loader.state_dict() == {"position": 4, "stream": {"position": 4}}
    assert "d9d-data-prefetch" not in [thread.name for thread in threading.enumerate()]


@pytest.mark.parametrize(("name", "least"), [("num_workers", 0), ("prefetch", 1)])
def test_numbers_out_of_range_are_refused(name: str, least: int) -> None:
    numbers: dict[str, Any] = {name: least - 1}
    with pytest.raises(UserError, match=f"{name} = {least - 1}; expected at least {least}"):
        StreamLoader(lists_stream(), Share(1), seed=0, **numbers)


def test_with_draws_false_random_draws_in_the_first_batch_are_refused() -> None:
    stream = IndexedStream(range(8), seed=0)
    seen = [
        [batch for batches in islice(StreamLoader(stream, Share(2), seed=0, draws=draws), 3) for batch in batches]
        for draws in (True, False)
    ]
    assert torch.equal(*map(torch.stack, seen))

    def collate(_samples: list[int]) -> torch.Tensor:
        return torch.rand(())

    with pytest.raises(UserError, match="drew random numbers from torch; expected none"):
        next(StreamLoader(stream, Share(2), seed=0, collate=collate, draws=False))
