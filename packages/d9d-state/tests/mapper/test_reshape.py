from itertools import product

import pytest
import torch
from torch import Tensor

from d9d_dist import Region
from d9d_state import TensorInfo
from d9d_state.mapper.fill import Destination
from d9d_state.mapper.reshape import reshape


def test_the_inverse_of_reshape_restores_the_shape() -> None:
    tensor = torch.arange(32)
    mapper = reshape("a", "b", [4, -1], source_shape=[32])
    output = mapper.apply({"a": tensor})
    assert output["b"].shape == (4, 8)
    assert torch.equal(mapper.inverse().apply(output)["a"], tensor)
    assert mapper.inverse().explain() == reshape("b", "a", [32], source_shape=[4, 8]).explain()
    assert mapper.inverse().inverse().explain() == reshape("a", "b", [4, 8]).explain()


def test_inverse_reshape_needs_source_shape() -> None:
    with pytest.raises(
        ValueError, match=r"reshape\(\[4, 8\]\) has no inverse; build it as reshape\(\.\.\., source_shape="
    ):
        reshape("a", "b", [4, 8]).inverse()


@pytest.mark.parametrize(
    ("shape", "source_shape", "message"),
    [
        ([4, 8], [33], r"reshape of a: shape \[33\] has 33 elements; expected as many as shape \[4, 8\] has"),
        ([5, -1], [32], r"shape \[32\] has 32 elements; expected as many as shape \[5, -1\]"),
        ([0, -1], [0], r"shape \[0\] has 0 elements; expected as many as shape \[0, -1\]"),
        ([-1, -1], None, r"got shape \[-1, -1\]; expected sizes of 0 or more, and at most one -1"),
        ([-2, 4], None, r"got shape \[-2, 4\]; expected sizes of 0 or more"),
    ],
)
def test_mismatched_shapes_are_refused(shape: list[int], source_shape: list[int] | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        reshape("a", "b", shape, source_shape=source_shape)


def test_reshape_checks_the_tensor() -> None:
    with pytest.raises(
        ValueError, match=r"reshape\(\[2, 2\]\) on a failed: shape \[5\] has 5 elements; expected as many as"
    ):
        reshape("a", "b", [2, 2]).infer({"a": TensorInfo((5,), torch.float32)})
    with pytest.raises(ValueError, match=r"got shape \[2, 2\]; expected \[4\]"):
        reshape("a", "b", [1, 4], source_shape=[4]).apply({"a": torch.ones(2, 2)})


class _Counting:
    def __init__(self, tensor: Tensor) -> None:
        self.tensors = {"a": TensorInfo.of(tensor)}
        self.count = torch.zeros_like(tensor)
        self.num_reads = 0
        self._tensor = tensor

    def read_into(self, name: str, region: Region, target: Tensor) -> None:
        assert name == "a"
        self.num_reads += 1
        region.of(self.count).add_(1)
        target.copy_(region.of(self._tensor))


def _regions(shape: tuple[int, ...]) -> list[Region]:
    ranges = [[(start, stop - start) for start in range(size) for stop in range(start + 1, size + 1)] for size in shape]
    return [Region(tuple(start for start, _ in box), tuple(size for _, size in box)) for box in product(*ranges)]


@pytest.mark.parametrize(
    ("source", "shape"),
    [
        ((12,), (3, 4)),
        ((3, 4), (12,)),
        ((4, 6), (8, 3)),
        ((2, 6), (2, 2, 1, 3)),
        ((2, 3, 4), (6, 4)),
        ((1, 6), (2, 3, 1)),
        ((2, 3, 2), (12,)),
        ((1,), ()),
        ((), (1, 1)),
    ],
)
def test_every_region_of_shapes_with_common_factors_is_read_exactly(
    source: tuple[int, ...], shape: tuple[int, ...]
) -> None:
    tensor = torch.arange(torch.Size(source).numel()).view(source)
    whole = tensor.reshape(shape)
    mapper = reshape("a", "b", shape)
    for region in _regions(shape):
        counting = _Counting(tensor)
        target = torch.full(region.sizes, -1)
        mapper.fill({"b": Destination(region, target)}, counting)
        assert torch.equal(target, region.of(whole)), region
        assert int(counting.count.sum()) == region.num_elements, region
        assert int(counting.count.max()) == 1, region


def test_head_region_needs_one_read_per_row() -> None:
    counting = _Counting(torch.arange(4 * 3 * 2 * 5).view(24, 5))
    target = torch.empty(4, 2, 5, dtype=torch.int64)
    region = Region((0, 1, 0, 0), (4, 1, 2, 5))
    reshape("a", "b", [4, 3, 2, 5]).fill({"b": Destination(region, target.unsqueeze(1))}, counting)
    assert counting.num_reads == 4


def test_adjacent_rows_are_one_read() -> None:
    counting = _Counting(torch.arange(24))
    target = torch.empty(2, 6, dtype=torch.int64)
    reshape("a", "b", [4, 2, 3]).fill({"b": Destination(Region((1, 0, 0), (2, 2, 3)), target.view(2, 2, 3))}, counting)
    assert counting.num_reads == 1
    assert target.flatten().tolist() == list(range(6, 18))
