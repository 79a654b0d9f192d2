from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset

from d9d_loop.data.contents import contents_of, digest_of, digest_of_files


@dataclass
class _Point:
    x: Any


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"a": 1}, {"a": 2}),
        ({"a": 1}, {"b": 1}),
        ([1, [2]], [[1], 2]),
        ("ab", "ba"),
        (b"ab", "ab"),
        (1, 1.0),
        (None, "None"),
        (torch.zeros(2, 3), torch.zeros(3, 2)),
        (torch.zeros(2), torch.zeros(2, dtype=torch.int32)),
        (torch.zeros(2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.bfloat16)),
        (np.zeros(2), np.ones(2)),
        (_Point("a"), _Point("b")),
    ],
)
def test_digests_differ_with_values_types_and_structure(one: Any, other: Any) -> None:
    assert digest_of(one) == digest_of(one) != digest_of(other)


def test_equal_contents_have_equal_digests() -> None:
    for make in cast_makers():
        assert digest_of(make()) == digest_of(make())


def cast_makers() -> list[Callable[[], Any]]:
    return [
        lambda: torch.arange(6).reshape(2, 3).t(),
        lambda: np.array([{"a": 1}], dtype=object),
        lambda: _Point(torch.ones(1)),
        object,  # only the type is compared
    ]


class _Noisy(Dataset[Any]):
    def __init__(self, values: list[int]) -> None:
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> Any:
        return self.values[index] + torch.randn(1)


def test_contents_of_a_dataset_are_its_samples_under_equal_random_numbers() -> None:
    numbers = list(range(100))
    state = torch.random.get_rng_state()
    assert contents_of(_Noisy(numbers)) == contents_of(_Noisy(numbers)) != contents_of(_Noisy(numbers[::-1]))
    assert torch.equal(torch.random.get_rng_state(), state)
    whole, even, odd = _Noisy(numbers), range(0, 100, 2), range(1, 100, 2)
    assert contents_of(Subset(whole, even)) == contents_of(Subset(whole, list(even))) != contents_of(Subset(whole, odd))
    assert contents_of(ConcatDataset([whole, whole])) != contents_of(ConcatDataset([whole, _Noisy(numbers[::-1])]))
    assert contents_of(numbers[::2]) != contents_of(numbers[1::2])
    assert contents_of([]) == contents_of([])


def test_a_large_file_is_compared_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("d9d_loop.data.contents._WHOLE", 0)
    monkeypatch.setattr("d9d_loop.data.contents._BLOCK", 16)
    one, other = tmp_path / "one", tmp_path / "other"
    one.write_bytes(bytes(range(256)) * 64)
    before = digest_of_files([one, one])
    for place in (0, 256 * 64 - 1):  # the first and the last byte are always in a block
        data = bytearray(one.read_bytes())
        data[place] ^= 1
        other.write_bytes(data)
        assert digest_of_files([one, other]) != before
