import random
from pathlib import Path
from typing import Any

import pytest
import torch
from example_streams import (
    assert_resumes_anywhere,
    document_stream,
    lists_stream,
    numbered_documents,
    some_lengths,
    write_tokens,
)
from hypothesis import given
from hypothesis import strategies as st

from d9d_dist import UserError
from d9d_loop.data import (
    DocumentStream,
    PackedStream,
    TokenizedStream,
    TokenWindows,
    best_fit_decreasing,
    pack_row,
)


def test_a_packed_stream_resumes_at_any_entry(tmp_path: Path) -> None:
    assert_resumes_anywhere(PackedStream(document_stream(tmp_path / "tokens"), row_length=12, window=16, seed=1), 60)


def test_every_pair_of_adjacent_tokens_is_an_input_and_label_once_per_epoch(tmp_path: Path) -> None:
    lengths = some_lengths(40, seed=0, longest=30)
    num_parts = sum(-(-(length - 1) // 12) for length in lengths)
    packed = PackedStream(document_stream(tmp_path / "tokens"), row_length=12, window=num_parts, seed=1)
    pairs: list[tuple[int, int]] = []
    cursor = packed.cursor()
    while len(pairs) < sum(lengths) - len(lengths):  # the first token of each document is not a label
        row = packed.read(cursor.take(1)[0])
        counted = row["labels"] != -100
        pairs += list(zip(row["input_ids"][counted].tolist(), row["labels"][counted].tolist(), strict=True))
    assert len(set(pairs)) == len(pairs) == sum(lengths) - len(lengths)
    assert all(label == token + 1 for token, label in pairs)  # tokens increase by 1 within a document
    starts = {sum(lengths[:number]) for number in range(len(lengths))}
    assert not starts & {label for _, label in pairs}


@given(lengths=st.lists(st.integers(1, 6), min_size=1, max_size=6), spare=st.integers(0, 4))
def test_a_packed_row_has_position_and_document_ids(lengths: list[int], spare: int) -> None:
    documents = [torch.tensor(tokens) for tokens in numbered_documents([length + 1 for length in lengths])]
    row = pack_row([{"tokens": tokens} for tokens in documents], sum(lengths) + spare, pad_token=7)
    assert row["input_ids"].tolist() == [t for tokens in documents for t in tokens[:-1].tolist()] + [7] * spare
    assert row["labels"].tolist() == [t for tokens in documents for t in tokens[1:].tolist()] + [-100] * spare
    assert row["position_ids"].tolist() == [p for length in lengths for p in range(length)] + [0] * spare
    numbers = [number for number, length in enumerate(lengths) for _ in range(length)]
    assert row["documents"].tolist() == numbers + [len(lengths)] * spare
    assert "sources" not in row


def test_rows_are_not_sorted_by_their_longest_document(tmp_path: Path) -> None:
    packed = PackedStream(document_stream(tmp_path / "tokens"), row_length=12, window=64, seed=1)
    firsts = [last - first for (_, first, last), *_ in packed.cursor().take(30)]
    assert firsts != sorted(firsts, reverse=True)


def test_ranks_get_equally_many_tokens(tmp_path: Path) -> None:
    draws = torch.Generator().manual_seed(0)
    lengths = torch.empty(20_000).log_normal_(3, 1, generator=draws).long().clamp(2, 400).tolist()
    file = write_tokens(tmp_path / "tokens", [[0] * length for length in lengths])
    packed = PackedStream(DocumentStream(file, max_length=256, seed=0), row_length=256, seed=0)
    entries = packed.cursor().take(4 * 1000)
    tokens = [sum(map(packed.length, entries[rank::4])) for rank in range(4)]
    assert max(tokens) / min(tokens) <= 1.005
    assert sum(tokens) >= (1 - 0.001) * len(entries) * 256


def test_a_document_that_does_not_fit_is_refused() -> None:
    documents = TokenizedStream(lists_stream(), lambda tokens: tokens, max_length=13)
    with pytest.raises(
        UserError, match=r"of length 12 does not fit into a row of length 5; .* max_length = row_length"
    ):
        PackedStream(documents, row_length=5, seed=0).cursor().take(1)


@pytest.mark.parametrize("name", ["row_length", "window"])
def test_sizes_below_one_are_refused(name: str) -> None:
    sizes: dict[str, Any] = {"row_length": 4, "window": 4, name: 0}
    with pytest.raises(UserError, match=f"{name} = 0; expected at least 1"):
        PackedStream(lists_stream(), seed=0, **sizes)


def _one_by_one(lengths: list[int], capacity: int) -> list[int]:
    """Return the free space of each row by textbook best-fit decreasing."""
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [number for number, room in enumerate(rooms) if room >= length]
        if fitting:
            rooms[min(fitting, key=lambda number: rooms[number])] -= length
        else:
            rooms.append(capacity - length)
    return rooms


@given(data=st.data(), capacity=st.integers(1, 60))
def test_packing_equals_textbook_best_fit_decreasing(data: st.DataObject, capacity: int) -> None:
    lengths = data.draw(st.lists(st.integers(1, capacity), max_size=80))
    rows = best_fit_decreasing(lengths, capacity)
    assert sorted(item for row in rows for item in row) == list(range(len(lengths)))
    rooms = [capacity - sum(lengths[item] for item in row) for row in rows]
    # Rows with equal free space are equivalent, so either may take an item.
    assert sorted(rooms) == sorted(_one_by_one(lengths, capacity))


@pytest.mark.parametrize("capacity", [2048, 4096, 8192])
def test_log_normal_lengths_have_little_padding(capacity: int) -> None:
    draws = random.Random(0)  # noqa: S311
    lengths = [min(max(int(draws.lognormvariate(6, 1)), 1), capacity) for _ in range(20_000)]
    rows = best_fit_decreasing(lengths, capacity)
    assert 1 - sum(lengths) / (len(rows) * capacity) <= 0.001


def test_without_documents_there_are_no_rows() -> None:
    assert best_fit_decreasing([], 5) == []


def test_windows_predict_each_token_once(tmp_path: Path) -> None:
    windows = TokenWindows(write_tokens(tmp_path / "tokens", numbered_documents([5, 9])), length=4)
    rows = [windows[index] for index in range(len(windows))]
    assert [row["input_ids"].tolist() for row in rows] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert [row["labels"].tolist() for row in rows] == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]]
    with pytest.raises(IndexError, match="window 3 is out of range: there are 3 windows"):
        windows[3]


@pytest.mark.parametrize("length", [0, 3])
def test_window_lengths_out_of_range_are_refused(tmp_path: Path, length: int) -> None:
    with pytest.raises(UserError, match=f"length = {length}, and the file has 3 tokens; expected at least 1"):
        TokenWindows(write_tokens(tmp_path / "tokens", [[1, 2, 3]]), length=length)
