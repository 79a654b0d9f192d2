from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from example_streams import CountedEpochs, assert_resumes_anywhere

from d9d_dist import UserError
from d9d_loop.data import IteratedStream, ShuffledStream


def test_an_iterated_stream_resumes_at_any_entry_across_epochs() -> None:
    entries = assert_resumes_anywhere(IteratedStream(CountedEpochs, name="numbers"), 40)
    assert [entry[0] for entry in entries] == list(range(40))


def test_an_iterable_without_a_state_is_an_error_that_says_what_is_missing() -> None:
    with pytest.raises(UserError, match="the data 'rows' of epoch 0 are a list; expected an iterable with the methods"):
        IteratedStream(lambda epoch: [1, 2], name="rows").cursor()  # ty: ignore[invalid-argument-type]


class _OneState:
    """Numbers whose state is one dict, which each element changes."""

    def __init__(self, _epoch: int) -> None:
        self._state = {"next": 0}

    def __iter__(self) -> Iterator[list[int]]:
        while self._state["next"] < 50:
            self._state["next"] += 1
            yield [self._state["next"] - 1]

    def state_dict(self) -> dict[str, int]:
        return self._state

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._state = state


def test_later_elements_do_not_change_a_state() -> None:
    stream = IteratedStream(_OneState, name="numbers")
    cursor = stream.cursor()
    cursor.take(4)
    state = cursor.state_dict()
    cursor.take(3)
    for _ in range(2):
        assert stream.cursor(state).take(2) == [[4], [5]]
    shuffled = ShuffledStream(stream, window=5, seed=0)
    cursor = shuffled.cursor()
    cursor.take(7)
    state = cursor.state_dict()
    following = cursor.take(6)
    assert shuffled.cursor(state).take(6) == following


class _KeepsItsState:
    """Numbers that start every later iteration from the loaded state, as `datasets.IterableDataset` does."""

    def __init__(self) -> None:
        self._start = self._next = 0

    def __iter__(self) -> Iterator[list[int]]:
        for number in range(self._start, 5):
            self._next = number + 1
            yield [number]

    def state_dict(self) -> dict[str, int]:
        return {"next": self._next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._start = self._next = state["next"]


def test_epochs_may_share_a_dataset_that_keeps_a_loaded_state() -> None:
    shared = _KeepsItsState()
    entries = assert_resumes_anywhere(IteratedStream(lambda epoch: shared, name="numbers"), 12)
    assert [entry[0] for entry in entries] == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1]


def test_only_read_samples_are_transformed() -> None:
    stream = IteratedStream(CountedEpochs, name="numbers", transform=lambda element: {"x": element[0]})
    assert stream.cursor().take(2) == [[0], [1, 1]]
    assert stream.read([7, 7]) == {"x": 7}
    assert stream.length([7, 7]) == 2
    assert IteratedStream(CountedEpochs, name="numbers").read([7, 7]) == [7, 7]


def test_an_epoch_without_elements_is_an_error() -> None:
    stream = IteratedStream(lambda epoch: CountedEpochs(epoch, size=0), name="nothing")
    with pytest.raises(UserError, match=r"epoch 0 of the data 'nothing' has no elements"):
        stream.cursor().take(1)


@pytest.mark.slow
def test_a_hugging_face_dataset_can_be_streamed(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="needs datasets, which is optional")
    for number in range(2):
        lines = "".join(f'{{"x": {10 * number + line}}}\n' for line in range(3 + number))
        (tmp_path / f"{number}.jsonl").write_text(lines, encoding="utf-8")
    files = sorted(map(str, tmp_path.glob("*.jsonl")))

    def epoch(_number: int) -> Any:
        return datasets.load_dataset("json", data_files=files, split="train", streaming=True)

    entries = assert_resumes_anywhere(IteratedStream(epoch, name="json"), 10)
    assert [entry["x"] for entry in entries] == [0, 1, 2, 10, 11, 12, 13, 0, 1, 2]
