import pytest
from example_streams import CountedEpochs, assert_resumes_anywhere

from d9d_dist import UserError
from d9d_loop.data import IteratedStream, ShuffledStream


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
