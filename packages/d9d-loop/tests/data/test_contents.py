from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset

from d9d_dist import MeshConfig, UserError
from d9d_dist.testing import run_ranks
from d9d_loop.data import IndexedStream, IteratedStream, SampleStream, TokenizedStream
from d9d_loop.data.contents import agree_on_data, contents_of, digest_of, digest_of_files, identity_of


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
    for make in _makers():
        assert digest_of(make()) == digest_of(make())


def _makers() -> list[Callable[[], Any]]:
    return [
        lambda: torch.arange(6).reshape(2, 3).t(),
        lambda: np.array([{"a": 1}], dtype=object),
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        lambda: torch.eye(3).to_sparse(),
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


class _Counting(_Noisy):
    num_reads = 0

    def __getitem__(self, index: int) -> Any:
        type(self).num_reads += 1
        return super().__getitem__(index)


def test_the_price_of_a_comparison_does_not_depend_on_the_number_of_datasets_and_indices() -> None:
    parts = [_Counting([number] * 20) for number in range(100)]
    other = [*parts[:-1], _Counting([7] * 20)]
    assert contents_of(ConcatDataset(parts)) != contents_of(ConcatDataset(other))
    assert _Counting.num_reads <= 32
    whole = _Noisy(list(range(100)))
    every: list[Any] = [torch.arange(0, 100, 2), np.arange(0, 100, 2)]
    for indices in every:
        assert contents_of(Subset(whole, indices)) == contents_of(Subset(whole, range(0, 100, 2)))


class _Unstable(_Noisy):
    def __getitem__(self, index: int) -> Any:
        raise RuntimeError(f"sample {index} is broken")


def test_a_broken_sample_is_an_error_where_it_is_used() -> None:
    assert contents_of(_Unstable([1, 2])) == contents_of(_Unstable([3, 4]))


def _streamed(first: int) -> IteratedStream:
    return IteratedStream(lambda epoch: Numbers(first, epoch), name="numbers", epochs=1)


class Numbers:
    """Iterable with a state."""

    def __init__(self, first: int, epoch: int) -> None:
        self.first, self.epoch = first, epoch

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.first, self.first + 6))

    def state_dict(self) -> Any:
        return {}

    def load_state_dict(self, state: Any) -> None:
        raise AssertionError(state)


def _tokenized(shift: int) -> TokenizedStream:
    stream = IndexedStream([[1, 2, 3]] * 5, seed=0)
    return TokenizedStream(stream, lambda sample: [each + shift for each in sample], max_length=4, name="shifted")


@pytest.mark.parametrize("make", [_streamed, _tokenized])
def test_the_first_samples_of_a_stream_are_compared(make: Callable[[int], SampleStream]) -> None:
    stream = make(0)
    assert stream.identity() == stream.identity() == make(0).identity() != make(1).identity()


def _message_on_ranks(kind: str) -> str:
    """Return the error for data of a rank."""
    with MeshConfig(data_parallel_replicate=2).build() as ctx:
        whole = [torch.full((2,), float(number)) for number in range(16)]
        generator = torch.Generator().manual_seed(ctx.rank)
        data: dict[str, Any] = {
            "part": whole[ctx.rank :: 2],
            "unseeded": torch.randn(16, 2, generator=generator),
            "augmented": _Noisy(list(range(16))),
        }
        torch.rand(ctx.rank)  # the states of the ranks differ
        stream = IndexedStream(data[kind], seed=0)
        try:
            agree_on_data({"the training data": identity_of(stream), "the evaluation data": identity_of(None)})
        except UserError as error:
            return str(error)
        return ""


@pytest.mark.parametrize("kind", ["part", "unseeded"])
def test_data_that_differ_between_ranks_are_an_error(kind: str) -> None:
    for message in run_ranks(_message_on_ranks, kind, world_size=2):
        assert message.startswith(
            "the training data differs between the 2 ranks: rank 1 differs from rank 0 in indexed.contents;"
        )
        assert message.endswith("data that are made with random numbers need a fixed seed.")


def test_random_augmentation_is_no_difference_between_ranks() -> None:
    assert run_ranks(_message_on_ranks, "augmented", world_size=2) == ["", ""]


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
