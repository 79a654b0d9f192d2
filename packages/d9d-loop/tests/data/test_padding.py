from collections.abc import Mapping
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from d9d_dist import UserError
from d9d_loop.data import PaddingCollate
from d9d_loop.data.padding import Side

SIDES: list[Side] = ["left", "right"]


@given(lengths=st.lists(st.integers(0, 6), min_size=1, max_size=5), side=st.sampled_from(SIDES))
def test_rows_have_their_values_on_one_side(lengths: list[int], side: Side) -> None:
    samples: list[Mapping[str, Any]] = [
        {"x": torch.arange(length), "flags": torch.ones(length, dtype=torch.bool)} for length in lengths
    ]
    batch = PaddingCollate({"x": -100, "flags": False}, multiple_of=4, side=side)(samples)
    assert batch["x"].shape == batch["flags"].shape == (len(lengths), -(-max(lengths) // 4) * 4)
    for row, flags, length in zip(batch["x"].tolist(), batch["flags"].tolist(), lengths, strict=True):
        added, num_added = [-100] * (len(row) - length), len(row) - length
        assert row == ([*range(length), *added] if side == "right" else [*added, *range(length)])
        assert flags == (
            [True] * length + [False] * num_added if side == "right" else [False] * num_added + [True] * length
        )


def test_lengths_are_rounded_up_and_further_dims_kept() -> None:
    batch = PaddingCollate({"x": -1.5}, multiple_of=4)([{"x": torch.ones(2, 3)}, {"x": torch.ones(5, 3)}])["x"]
    assert batch.shape == (2, 8, 3)
    assert batch.sum() == 21 - 1.5 * 27
    assert PaddingCollate({"x": 0}, length=5, multiple_of=4)([{"x": [1, 1]}])["x"].shape == (1, 8)


def test_a_sequence_that_is_too_long_is_refused() -> None:
    with pytest.raises(UserError, match="of length 5 is longer than 4; truncate it, or increase length"):
        PaddingCollate({"x": 0}, length=4)([{"x": [1] * 5}])


def test_the_collate_function_pads_the_values_of_dictionaries() -> None:
    collate = PaddingCollate({"input_ids": 0, "labels": -100}, multiple_of=2, mask="mask")
    samples: list[Mapping[str, Any]] = [
        {"input_ids": [1, 2, 3], "labels": torch.tensor([2, 3, 4]), "weight": 0.5},
        {"input_ids": [5], "labels": torch.tensor([6]), "weight": 1.5},
    ]
    batch = collate(samples)
    assert batch["input_ids"].tolist() == [[1, 2, 3, 0], [5, 0, 0, 0]]
    assert batch["labels"].tolist() == [[2, 3, 4, -100], [6, -100, -100, -100]]
    assert batch["mask"].tolist() == [[True, True, True, False], [True, False, False, False]]
    assert batch["weight"].tolist() == [0.5, 1.5]
    assert PaddingCollate({"a": 0}, side="left")([{"a": [1]}, {"a": [2, 3]}])["a"].tolist() == [[0, 1], [2, 3]]


def test_a_sample_without_a_key_is_refused() -> None:
    with pytest.raises(UserError, match="a sample lacks the keys labels; it has input_ids"):
        PaddingCollate({"input_ids": 0, "labels": -100})([{"input_ids": [1]}])


def test_an_unknown_side_is_an_error() -> None:
    with pytest.raises(UserError, match="side = 'Right'; expected one of left, right"):
        PaddingCollate({"a": 0}, side=cast(Any, "Right"))
