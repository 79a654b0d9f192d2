import pytest
from hypothesis import given
from hypothesis import strategies as st

from d9d_dist import UserError
from d9d_loop.data import IndexedStream, SubsetStream
from d9d_loop.data.evaluation_pass import check_evaluation_data, plan_pass
from d9d_loop.data.sample_reader import ReadJob

SMALL = st.integers(1, 5)


@given(
    data_size=st.integers(1, 60),
    num_samples=st.none() | st.integers(1, 70),
    batch_size=SMALL,
    ranks=SMALL,
    is_stream=st.booleans(),
)
def test_every_sample_is_counted_once_in_equally_many_batches(
    data_size: int, num_samples: int | None, batch_size: int, ranks: int, *, is_stream: bool
) -> None:
    if is_stream:
        stream = IndexedStream(range(data_size), seed=3, epochs=1)
        limit, expected = num_samples, stream.cursor().take(num_samples or data_size)
    else:
        stream, limit = SubsetStream(range(data_size), num_samples), None
        count = min(num_samples or data_size, data_size)
        expected = stream.cursor().take(data_size + 1)
        assert len(set(expected)) == count
        assert expected == sorted(expected)
    of_ranks = [
        plan_pass(stream, batch_size=batch_size, dp_rank=rank, dp_size=ranks, num_samples=limit)
        for rank in range(ranks)
    ]
    real = sorted((job for jobs, num_real in of_ranks for job in jobs[:num_real]), key=lambda job: job.position)
    assert [entry for job in real for entry in job.entries] == expected
    assert [job.position for job in real] == [number * batch_size for number in range(len(real))]
    assert {len(job.entries) for job in real[:-1]} <= {batch_size}
    assert len({len(jobs) for jobs, _ in of_ranks}) == 1
    padding = [job for jobs, num_real in of_ranks for job in jobs[num_real:]]
    assert all(job == ReadJob(0, expected[:1]) for job in padding)
    assert len(padding) < ranks


@pytest.mark.parametrize("period", [2, 4, 10, 20])
def test_a_part_of_periodic_data_has_every_kind(period: int) -> None:
    """Every 20th sample of alternating classes would be of one class."""
    chosen = SubsetStream(range(2000), 200).cursor().take(2000)
    counts = [sum(index % period == kind for index in chosen) for kind in range(period)]
    mean = 200 / period
    assert all(abs(count - mean) < 5 * mean**0.5 for count in counts)
    assert chosen == SubsetStream(range(2000), 200).cursor().take(200)


def test_a_subset_resumes_and_reads() -> None:
    stream = SubsetStream([[number] * number for number in range(10)], 5)
    cursor = stream.cursor()
    first = cursor.take(2)
    assert stream.cursor(cursor.state_dict()).take(9) == (rest := cursor.take(9))
    assert [*first, *rest] == sorted({*first, *rest})
    assert len(rest) == 3
    assert cursor.take(1) == []
    assert (stream.read(4), stream.length(4)) == ([4] * 4, 4)
    with pytest.raises(UserError, match=r"length of a sample of type dict is unknown"):
        SubsetStream([{"x": [1, 2]}]).length(0)
    assert stream.identity() != SubsetStream(range(10), 5).identity()


def test_data_without_an_end_or_a_sample_are_refused() -> None:
    endless = IndexedStream(range(3), seed=0)
    with pytest.raises(UserError, match=r"endless stream; expected a finite one, .* Pass epochs=1 .*num_samples\.$"):
        check_evaluation_data(endless, num_samples=None)
    check_evaluation_data(endless, num_samples=2)
    check_evaluation_data(IndexedStream(range(3), seed=0, epochs=1), num_samples=None)
    with pytest.raises(UserError, match=r"^the evaluation data are empty; expected at least one sample"):
        check_evaluation_data([], num_samples=None)
    with pytest.raises(UserError, match=r"^the evaluation data are empty; expected at least one sample"):
        plan_pass(SubsetStream([]), batch_size=1, dp_rank=0, dp_size=1)
