from pathlib import Path

import pytest
from example_streams import numbered_documents, some_lengths, write_tokens

from d9d_dist import UserError
from d9d_loop.data import PackedSamples, TokenWindows


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


def test_packs_all_documents_at_once(tmp_path: Path) -> None:
    lengths = some_lengths(30, seed=2, longest=20)
    samples = PackedSamples(write_tokens(tmp_path / "tokens", numbered_documents(lengths)), row_length=8)
    labels = [label for index in range(len(samples)) for label in samples[index]["labels"].tolist() if label != -100]
    starts = {sum(lengths[:number]) for number in range(len(lengths))}
    assert sorted(labels) == [token for token in range(sum(lengths)) if token not in starts]
    assert len(samples) <= -(-len(labels) // 8) + 2


def test_documents_of_one_token_and_empty_rows_are_refused(tmp_path: Path) -> None:
    file = write_tokens(tmp_path / "tokens", [[1], [2]])
    with pytest.raises(UserError, match="no document has two tokens"):
        PackedSamples(file, row_length=8)
    with pytest.raises(UserError, match="row_length = 0; expected at least 1"):
        PackedSamples(file, row_length=0)
