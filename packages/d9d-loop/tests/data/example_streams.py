"""Example streams, and checks that every stream must pass."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from pydantic import JsonValue

from d9d_loop.data import Cursor, DocumentStream, IndexedStream, SampleStream, TokenFile, TokenFileWriter


def through_json(state: JsonValue) -> JsonValue:
    """Return a state after a round trip through a checkpoint."""
    return json.loads(json.dumps(state))


def _take(cursor: Cursor, num_entries: int) -> list[Any]:
    """Return the next entries, also of several epochs; fewer only at the end of a finite stream."""
    taken: list[Any] = []
    while len(taken) < num_entries and (more := cursor.take(num_entries - len(taken))):
        taken += more
    return taken


def entries_with_states(stream: SampleStream, count: int) -> tuple[list[Any], list[JsonValue]]:
    """Return the first entries, taken one by one, and the state before each and after the last."""
    cursor = stream.cursor()
    entries, states = [], [through_json(cursor.state_dict())]
    for _ in range(count):
        entries += cursor.take(1)
        states.append(through_json(cursor.state_dict()))
    return entries, states


def assert_resumes_anywhere(stream: SampleStream, count: int) -> list[Any]:
    """Check that the stream resumes after any number of entries, in portions of any size."""
    entries, states = entries_with_states(stream, count)
    assert _take(stream.cursor(), count) == entries
    cursor, taken, portion = stream.cursor(), 0, 2
    while taken + portion <= count:  # the state does not depend on the portions
        assert _take(cursor, portion) == entries[taken : taken + portion]
        taken += portion
        assert through_json(cursor.state_dict()) == states[taken], taken
        portion = portion * 3 % 11  # 2, 6, 7, 10, 8, 2, ...
    for taken, state in enumerate(states):
        cursor = stream.cursor(state)
        assert through_json(cursor.state_dict()) == state
        first = (count - taken) // 3
        assert _take(cursor, first) + _take(cursor, count - taken - first) == entries[taken:], taken
    return entries


def write_tokens(folder: Path, documents: list[list[int]], *, vocab_size: int = 1000) -> TokenFile:
    with TokenFileWriter(folder, vocab_size=vocab_size) as writer:
        for tokens in documents:
            writer.append(tokens)
    return TokenFile(folder)


def numbered_documents(lengths: list[int]) -> list[list[int]]:
    """Return documents with unique tokens, which encode their position."""
    starts = [sum(lengths[:number]) for number in range(len(lengths))]
    return [list(range(start, start + length)) for start, length in zip(starts, lengths, strict=True)]


def some_lengths(count: int, *, seed: int, longest: int) -> list[int]:
    draws = torch.randint(1, longest + 1, (count,), generator=torch.Generator().manual_seed(seed))
    return draws.tolist()


def document_stream(folder: Path, *, count: int = 40, longest: int = 30, max_length: int = 12) -> DocumentStream:
    lengths = some_lengths(count, seed=0, longest=longest)
    file = write_tokens(folder, numbered_documents(lengths), vocab_size=1 + sum(lengths))
    return DocumentStream(file, max_length=max_length, seed=3)


class CountedEpochs:
    """Epoch of numbers that can save its position, like a streamed dataset."""

    def __init__(self, epoch: int, size: int = 11) -> None:
        self._epoch, self._size = epoch, size
        self._next: int = 0

    def __iter__(self) -> Iterator[list[int]]:
        while self._next < self._size:
            self._next += 1
            number: int = self._epoch * self._size + self._next - 1
            yield [number] * (1 + number % 5)
        self._next = 0

    def state_dict(self) -> Any:
        return {"next": self._next}

    def load_state_dict(self, state: Any) -> None:
        self._next = state["next"]


def lists_stream(count: int = 23, *, seed: int = 0) -> IndexedStream:
    """Return lists of different lengths."""
    return IndexedStream([[number] * (1 + number * 7 % 13) for number in range(count)], seed=seed)
