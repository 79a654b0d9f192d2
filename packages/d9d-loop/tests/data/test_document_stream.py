from pathlib import Path

import pytest
import torch
from example_streams import assert_resumes_anywhere, document_stream, lists_stream, numbered_documents, write_tokens
from hypothesis import given
from hypothesis import strategies as st

from d9d_dist import UserError
from d9d_loop.data import DocumentStream, IndexedStream, TokenizedStream
from d9d_loop.data.document import cut


@given(num_tokens=st.integers(0, 50), max_length=st.integers(1, 20))
def test_splitting_a_document_keeps_every_pair_of_adjacent_tokens(num_tokens: int, max_length: int) -> None:
    pairs = [(token, token + 1) for first, last in cut(num_tokens, max_length) for token in range(first, last)]
    assert pairs == [(token, token + 1) for token in range(num_tokens - 1)]
    assert all(0 < last - first <= max_length for first, last in cut(num_tokens, max_length))


def test_a_document_stream_resumes_at_any_entry_also_inside_documents(tmp_path: Path) -> None:
    entries = assert_resumes_anywhere(document_stream(tmp_path / "tokens", count=9, max_length=4), 60)
    assert max(first for _, first, _ in entries) > 8


def test_an_entry_reads_only_its_part_of_a_document(tmp_path: Path) -> None:
    file = write_tokens(tmp_path / "tokens", numbered_documents([3, 9]))
    stream = DocumentStream(file, max_length=4, seed=0, shuffle=False)
    entries = stream.cursor().take(4)
    assert entries == [(0, 0, 2), (1, 0, 4), (1, 4, 8), (0, 0, 2)]
    assert [stream.read(entry)["tokens"].tolist() for entry in entries[:3]] == [
        [0, 1, 2],
        [3, 4, 5, 6, 7],
        [7, 8, 9, 10, 11],
    ]
    assert [stream.length(entry) for entry in entries[:3]] == [2, 4, 4]


def test_documents_of_one_token_are_skipped(tmp_path: Path) -> None:
    file = write_tokens(tmp_path / "tokens", [[1], [2, 3], [4]])
    assert DocumentStream(file, max_length=4, seed=0).cursor().take(3) == [(1, 0, 1)] * 3


def test_data_with_only_documents_of_one_token_are_refused(tmp_path: Path) -> None:
    file = write_tokens(tmp_path / "tokens", [[1], [2]])
    with pytest.raises(UserError, match="all 2 documents have fewer than two tokens, so there is nothing to predict"):
        DocumentStream(file, max_length=4, seed=0)


def test_the_identity_of_a_document_stream_depends_on_tokens_and_length(tmp_path: Path) -> None:
    one, same, other = (write_tokens(tmp_path / name, [[1, n]]) for name, n in (("a", 2), ("b", 2), ("c", 3)))
    identities = [DocumentStream(file, max_length=4, seed=0).identity() for file in (one, same, other)]
    assert identities[0] == identities[1] != identities[2]
    assert DocumentStream(one, max_length=5, seed=0).identity() != identities[0]


def test_documents_are_tokenized_while_read() -> None:
    texts = IndexedStream(["abcdef", "x", "", "yz"], seed=0, shuffle=False)
    stream = TokenizedStream(
        texts, lambda text: torch.tensor([ord(character) for character in text]), max_length=3, window=3
    )
    entries = assert_resumes_anywhere(stream, 11)
    read = ["".join(map(chr, stream.read(entry)["tokens"].tolist())) for entry in entries[:4]]
    assert read == ["abcd", "def", "yz", "abcd"]
    assert [stream.length(entry) for entry in entries[:3]] == [3, 2, 1]


def test_only_empty_documents_are_an_error() -> None:
    stream = TokenizedStream(lists_stream(), lambda _sample: [1], max_length=3)
    with pytest.raises(UserError, match=r"6400 consecutive samples gave no documents; .* two tokens"):
        stream.cursor().take(1)


def test_sizes_below_one_are_refused(tmp_path: Path) -> None:
    file = write_tokens(tmp_path / "tokens", [[1, 2]])
    with pytest.raises(UserError, match="max_length = 0; expected at least 1 position"):
        DocumentStream(file, max_length=0, seed=0)
    with pytest.raises(UserError, match="window = 0; expected at least 1 sample"):
        TokenizedStream(lists_stream(), list, max_length=1, window=0)
