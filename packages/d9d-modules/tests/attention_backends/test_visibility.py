import pytest
import torch

from d9d_modules import AttentionOptions, documents_of_lengths
from d9d_modules.attention_backends.visibility import document_runs, document_starts, visible


@pytest.mark.parametrize("window", [None, 1, 3, 20])
@pytest.mark.parametrize(("length", "key_length"), [(7, 7), (3, 7)])
@pytest.mark.parametrize(("has_documents", "has_mask"), [(False, False), (False, True), (True, False), (True, True)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_visibility_equals_a_loop_over_queries_and_keys(
    *, length: int, key_length: int, window: int | None, has_documents: bool, has_mask: bool, is_causal: bool
) -> None:
    documents = torch.randint(0, 3, (2, key_length)) if has_documents else None
    mask = torch.rand(2, length, key_length) < 0.5 if has_mask else None
    queries, keys = torch.empty(2, length, 1, 1), torch.empty(2, key_length, 1, 1)
    options = AttentionOptions(is_causal=is_causal, window=window)
    seen = visible(queries, keys, options, documents_BS=documents, mask_BLS=mask)
    assert seen.shape == ((2, 1, length, key_length) if has_documents or has_mask else (length, key_length))
    for row in range(2):
        for query in range(length):
            now = key_length - length + query
            for key in range(key_length):
                expected = (key <= now or not is_causal) and (window is None or abs(key - now) < window)
                if mask is not None:
                    expected = expected and bool(mask[row, query, key])
                if documents is not None:
                    expected = expected and bool(documents[row, key] == documents[row, now])
                assert seen.expand(2, 1, length, key_length)[row, 0, query, key] == expected


def test_document_runs_are_the_lengths_of_documents() -> None:
    assert document_runs(torch.tensor([[4, 4, 0, 0, 0, 9], [1, 1, 1, 1, 1, 1]])) == [[2, 3, 1], [6]]


def test_a_non_contiguous_document_has_no_run() -> None:
    assert document_runs(torch.tensor([[0, 0, 1], [0, 1, 0]])) is None


def test_document_ids_follow_from_cumulative_lengths() -> None:
    documents = documents_of_lengths(torch.tensor([0, 2, 3, 6, 9], dtype=torch.int32), batch=2, length=5)
    assert document_runs(documents) == [[2, 1, 2], [1, 3, 1]]


def test_a_document_starts_where_the_id_differs_from_the_position_before() -> None:
    documents = torch.tensor([[3, 3, 1, 3, 3], [0, 1, 2, 2, 2]])
    expected = [[False, False, True, True, False], [False, True, True, False, False]]
    assert document_starts(documents).tolist() == expected


def test_empty_rows_have_no_document_starts() -> None:
    assert document_starts(torch.zeros(2, 0)).shape == (2, 0)
