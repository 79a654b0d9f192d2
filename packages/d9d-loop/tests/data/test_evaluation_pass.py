import pytest
from hypothesis import given
from hypothesis import strategies as st

from d9d_dist import UserError
from d9d_loop.data import EvenlySpacedStream, IndexedStream
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
        stream, limit = EvenlySpacedStream(range(data_size), num_samples), None
        count = min(num_samples or data_size, data_size)
        expected = [number * data_size // count for number in range(count)]
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


def test_a_part_of_the_samples_is_spread_over_the_data() -> None:
    jobs, num_real = plan_pass(EvenlySpacedStream(range(10), 4), batch_size=3, dp_rank=0, dp_size=1)
    assert ([job.entries for job in jobs], num_real) == ([[0, 2, 5], [7]], 2)


def test_a_spaced_stream_resumes_and_reads() -> None:
    stream = EvenlySpacedStream([[number] * number for number in range(10)], 5)
    cursor = stream.cursor()
    assert cursor.take(2) == [0, 2]
    assert stream.cursor(cursor.state_dict()).take(9) == cursor.take(9) == [4, 6, 8]
    assert cursor.take(1) == []
    assert (stream.read(4), stream.length(4)) == ([4] * 4, 4)
    with pytest.raises(UserError, match=r"length of a sample of type dict is unknown"):
        EvenlySpacedStream([{"x": [1, 2]}]).length(0)
    assert stream.identity() != EvenlySpacedStream(range(10), 4).identity()


def test_data_without_an_end_or_a_sample_are_refused() -> None:
    endless = IndexedStream(range(3), seed=0)
    with pytest.raises(UserError, match=r"endless stream; expected a finite one, .* Pass epochs=1 .*num_samples\.$"):
        check_evaluation_data(endless, num_samples=None)
    check_evaluation_data(endless, num_samples=2)
    check_evaluation_data(IndexedStream(range(3), seed=0, epochs=1), num_samples=None)
    with pytest.raises(UserError, match=r"^the evaluation data are empty; expected at least one sample"):
        check_evaluation_data([], num_samples=None)
    with pytest.raises(UserError, match=r"^the evaluation data are empty; expected at least one sample"):
        plan_pass(EvenlySpacedStream([]), batch_size=1, dp_rank=0, dp_size=1)
