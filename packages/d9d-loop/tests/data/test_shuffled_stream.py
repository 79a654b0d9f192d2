import pytest
from example_streams import CountedEpochs, assert_resumes_anywhere, lists_stream

from d9d_dist import UserError
from d9d_loop.data import BucketedStream, IteratedStream, ShuffledStream


def test_shuffles_each_window_in_another_order_and_resumes_anywhere() -> None:
    stream = ShuffledStream(IteratedStream(CountedEpochs, name="numbers"), window=10, seed=0)
    numbers = [entry[0] for entry in assert_resumes_anywhere(stream, 35)]
    windows = [[number - start for number in numbers[start : start + 10]] for start in (0, 10, 20)]
    assert all(sorted(window) == list(range(10)) for window in windows)
    assert windows[0] != windows[1] != windows[2]
    assert (
        ShuffledStream(IteratedStream(CountedEpochs, name="numbers"), window=10, seed=1).cursor().take(10) != windows[0]
    )


def test_a_window_of_zero_entries_is_refused() -> None:
    with pytest.raises(UserError, match="window = 0; expected at least 1 entry"):
        ShuffledStream(IteratedStream(CountedEpochs, name="numbers"), window=0, seed=0)


def test_a_bucketed_stream_resumes_at_any_entry() -> None:
    assert_resumes_anywhere(BucketedStream(lists_stream(), group_size=3, num_groups=4, seed=0), 40)


def test_similar_lengths_are_grouped_within_each_window() -> None:
    stream = lists_stream(200)
    plain = stream.cursor().take(192)
    bucketed = BucketedStream(stream, group_size=4, num_groups=24, seed=0).cursor().take(192)
    padding = 0
    for start in range(0, 192, 96):
        assert sorted(bucketed[start : start + 96]) == sorted(plain[start : start + 96])
        groups = [bucketed[begin : begin + 4] for begin in range(start, start + 96, 4)]
        lengths = [[stream.length(entry) for entry in group] for group in groups]
        padding += sum(4 * max(group) - sum(group) for group in lengths)
        firsts = [max(group) for group in lengths]
        assert firsts != sorted(firsts)  # the groups are shuffled
    assert padding / sum(map(stream.length, bucketed)) < 0.05


@pytest.mark.parametrize("name", ["group_size", "num_groups"])
def test_sizes_below_one_are_refused(name: str) -> None:
    sizes = {"group_size": 2, "num_groups": 2, name: 0}
    with pytest.raises(UserError, match=f"{name} = 0; expected at least 1"):
        BucketedStream(lists_stream(), seed=0, **sizes)
