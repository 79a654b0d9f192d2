import torch

from d9d_modules._document_starts import document_starts


def test_a_document_starts_where_the_id_differs_from_the_position_before() -> None:
    documents = torch.tensor([[3, 3, 1, 3, 3], [0, 1, 2, 2, 2]])
    expected = [[False, False, True, True, False], [False, True, True, False, False]]
    assert document_starts(documents).tolist() == expected


def test_empty_rows_have_no_document_starts() -> None:
    assert document_starts(torch.zeros(2, 0)).shape == (2, 0)
