"""Streams that end: every transform of a finite stream is finite, and has exactly the samples of its epochs."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from example_streams import assert_resumes_anywhere, numbered_documents, some_lengths, write_tokens

from d9d_dist import UserError
from d9d_loop.data import (
    BucketedStream,
    DocumentStream,
    IndexedStream,
    IteratedStream,
    MixtureStream,
    PackedStream,
    SampleStream,
    Share,
    ShuffledStream,
    StreamLoader,
    TokenizedStream,
)


class _Numbers:
    """Iterable of 0 to 9 that keeps its place."""

    def __init__(self) -> None:
        self._next = 0

    def __iter__(self) -> Iterator[int]:
        while self._next < 10:
            self._next += 1
            yield self._next - 1

    def state_dict(self) -> int:
        return self._next

    def load_state_dict(self, state: int) -> None:
        self._next = state


def _indexed(epochs: int | None = 2) -> IndexedStream:
    return IndexedStream(range(10), seed=1, length=lambda index: index + 1, epochs=epochs)


STREAMS: dict[str, Callable[[], SampleStream]] = {
    "indexed": _indexed,
    "iterated": lambda: IteratedStream(lambda _epoch: _Numbers(), name="numbers", length=lambda x: x + 1, epochs=2),
    "shuffled": lambda: ShuffledStream(_indexed(), window=7, seed=0),
    "bucketed": lambda: BucketedStream(_indexed(), group_size=3, num_groups=2, seed=0),
}


@pytest.mark.parametrize("kind", STREAMS)
def test_a_finite_stream_has_each_sample_once_per_epoch_and_ends(kind: str) -> None:
    stream = STREAMS[kind]()
    assert not stream.is_endless
    entries = assert_resumes_anywhere(stream, 20)
    assert sorted(entries) == sorted([*range(10)] * 2)
    cursor = stream.cursor()
    assert [len(cursor.take(9)) for _ in range(5)] == [9, 1, 9, 1, 0]  # a batch has samples of one epoch
    assert stream.cursor(cursor.state_dict()).take(1) == []
    cursor = stream.cursor()
    states = [None, *(cursor.state_dict() for _ in range(8) if cursor.take(3))]
    assert [stream.num_batches(4, state) for state in states] == [6, 5, 4, 4, 3, 2, 1, 1, 0]


@pytest.mark.parametrize("window", [3, 100])
def test_labels_of_an_epoch_contain_each_token_but_the_first_of_a_document_once(window: int, tmp_path: Path) -> None:
    lengths = some_lengths(23, seed=2, longest=30)
    file = write_tokens(tmp_path / "tokens", numbered_documents(lengths))
    documents = DocumentStream(file, max_length=12, seed=0, epochs=1)
    tokenized = TokenizedStream(
        IndexedStream(numbered_documents(lengths), seed=0, epochs=1), lambda tokens: tokens, max_length=12
    )
    for stream in (documents, tokenized):
        packed = PackedStream(stream, row_length=12, window=window, seed=1)
        assert not packed.is_endless
        rows = [packed.read(entry) for entry in packed.cursor().take(10_000)]
        labels = torch.cat([row["labels"][row["labels"] != -100] for row in rows])
        assert len(labels) == len(labels.unique()) == sum(lengths) - len(lengths)


def test_a_mixture_needs_endless_sources() -> None:
    with pytest.raises(
        UserError, match=r"the mixture sources b are finite; expected endless .* Set epochs=None for these sources\.$"
    ):
        MixtureStream({"a": _indexed(None), "b": _indexed(1)}, weights={"a": 1.0, "b": 1.0}, seed=0)


def test_the_last_step_of_training_has_the_remaining_samples() -> None:
    """10 samples in steps of 8, on 2 ranks with 2 microbatches of 2: rank 1 has no samples in the last step."""
    seen = []
    for rank in range(2):
        loader = StreamLoader(_indexed(1), Share(2, 2, rank, 2), seed=0, collate=list)
        steps, short = [], []
        for batches in loader:
            steps.append((batches, loader.num_own))
            short.append(loader.has_stand_ins)
        assert short == [False, True]  # on both ranks
        assert [[len(batch) for batch in batches] for batches, _ in steps] == [[2, 2], [2, 1] if rank == 0 else [1, 1]]
        assert [num_own for _, num_own in steps] == [2, 1 if rank == 0 else 0]
        seen += [sample for batches, num_own in steps for batch in batches[:num_own] for sample in batch]
        with pytest.raises(StopIteration):
            next(loader)
        assert loader.state_dict() == {"position": 10, "stream": {"position": 10}}
    stream = _indexed(1)
    expected = [stream.read(entry) for entry in stream.cursor().take(10)]
    assert sorted(map(str, seen)) == sorted(map(str, expected))


def test_finite_streams_count_their_samples() -> None:
    assert _indexed(3).count() == 30


def test_rows_and_documents_of_a_batch_are_of_one_epoch(tmp_path: Path) -> None:
    file = write_tokens(tmp_path / "tokens", numbered_documents([5] * 12))
    documents = DocumentStream(file, max_length=2, seed=0, epochs=3)  # 2 parts each
    packed = PackedStream(documents, row_length=4, window=10, seed=0)
    for stream, size, num in ((documents, 7, 24), (packed, 5, 12)):
        cursor, found = stream.cursor(), []
        while entries := cursor.take(size):
            found.append(len(entries))
        assert found == [*[size] * (num // size), num % size] * 3
        assert stream.num_batches(size) == len(found)


@pytest.mark.parametrize(
    "make", [lambda: _indexed(0), lambda: IteratedStream(lambda _epoch: _Numbers(), name="", epochs=0)]
)
def test_zero_epochs_are_refused(make: Callable[[], Any]) -> None:
    with pytest.raises(UserError, match=r"epochs = 0; expected at least 1, or None for an endless stream"):
        make()
