from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import Shard, distribute_tensor

from d9d_dist import MeshConfig, UserError
from d9d_dist.collectives.tree_gather import all_gather_trees, gather_variadic
from d9d_dist.testing import Device, run_ranks


def _gather() -> tuple[list[Any], str]:
    with MeshConfig(data_parallel_replicate=2).build() as ctx:
        trees = [[{"x": torch.arange(3), "name": "a"}], []]
        found = all_gather_trees(trees[ctx.rank], None)
        try:
            all_gather_trees([object()] if ctx.rank else [], None)
        except UserError as error:
            return found, str(error)
    return found, ""


def test_trees_of_different_structure_arrive_on_every_rank() -> None:
    for (first, second), message in run_ranks(_gather, world_size=2):
        assert torch.equal(first[0]["x"], torch.arange(3))
        assert (first[0]["name"], second) == ("a", [])
        assert "is not JSON" in message or "JSON" in message


_DTYPES = (torch.bool, torch.int16, torch.uint32, torch.bfloat16, torch.float8_e4m3fn, torch.complex64)


def _gather_dtypes() -> list[tuple[str, Any]]:
    with MeshConfig(data_parallel_replicate=2).build() as ctx:
        tree = [torch.ones(2, 1).to(dtype) for dtype in _DTYPES]
        tree.append(torch.ones((), dtype=torch.complex64).conj())
        found = all_gather_trees(tree if ctx.is_main_process else [], None)[0]
        return [(str(each.dtype), each.tolist()) for each in found]


def test_tensors_of_every_dtype_arrive() -> None:
    expected = [(str(dtype), torch.ones(2, 1).to(dtype).tolist()) for dtype in _DTYPES]
    for found in run_ranks(_gather_dtypes, world_size=2):
        assert found == [*expected, ("torch.complex64", 1)]


def _gather_dtensor() -> str:
    with MeshConfig(data_parallel_replicate=2).build() as ctx:
        sharded = distribute_tensor(torch.ones(2), ctx.mesh_for("regular")["dp_replicate"], [Shard(0)])
        try:
            all_gather_trees([sharded] if ctx.is_main_process else [], None)
        except UserError as error:
            return str(error)
    return ""


def test_a_dtensor_is_refused_on_every_rank() -> None:
    first, second = run_ranks(_gather_dtensor, world_size=2, timeout=60)
    assert first == second
    assert "to_local()" in first


def _shares_memory() -> list[bool]:
    with MeshConfig(data_parallel_replicate=2).build() as ctx:
        mine = torch.full((2,), float(ctx.rank))
        found = all_gather_trees([mine], None)
        assert [each.tolist() for (each,) in found] == [[0, 0], [1, 1]]
        return [each.data_ptr() == mine.data_ptr() for (each,) in found]


def test_the_tensors_of_this_rank_are_not_copied() -> None:
    assert run_ranks(_shares_memory, world_size=2) == [[True, False], [False, True]]


VARIADIC_SHAPES = [
    [(2, 3), (4, 1), (0, 7)],  # one rank's tensor is empty
    [(0, 3), (0, 3), (5, 0)],  # all tensors are empty
    [(3, 3), (3, 3), (3, 3)],  # equal shapes
    [(), (), ()],
    [(5,), (0,), (1,)],
]


def _variadic_tensor(case: int, rank: int) -> Tensor:
    draws = torch.Generator().manual_seed(rank)
    shape = VARIADIC_SHAPES[case][rank]
    order = tuple(reversed(range(len(shape))))
    return torch.randn(tuple(reversed(shape)), dtype=torch.float64, generator=draws).permute(order)


def _variadic(dtype: torch.dtype) -> list[bool]:
    with MeshConfig(data_parallel_shard=-1).build() as ctx:
        are_right = []
        for case in range(len(VARIADIC_SHAPES)):
            expected = [_variadic_tensor(case, rank).to(dtype) for rank in range(3)]
            mine = expected[ctx.rank].to(ctx.device)
            gathered = gather_variadic(mine, dst=2)
            are_right.append(gathered is None if ctx.rank < 2 else _are_equal(gathered, expected))
        return are_right


def _are_equal(found: list[Tensor] | None, expected: list[Tensor]) -> bool:
    assert found is not None
    pairs = zip(found, expected, strict=True)
    return all(x.dtype == y.dtype and x.shape == y.shape and torch.equal(x.cpu(), y) for x, y in pairs)


@pytest.mark.world_size(3)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.bool], ids=str)
def test_gather_variadic_returns_tensors_of_different_shapes(dtype: torch.dtype, device: Device) -> None:
    assert run_ranks(_variadic, dtype, world_size=3, device=device) == [[True] * 5] * 3


def _bytes_sent() -> list[tuple[int, int]]:
    """Return the bytes that this rank sends in each case, and the number of collectives."""
    with MeshConfig(data_parallel_shard=-1).build() as ctx:
        found = []
        for case in range(3):
            with (
                mock.patch.object(dist, "all_gather_into_tensor", wraps=dist.all_gather_into_tensor) as shapes,
                mock.patch.object(dist, "all_to_all_single", wraps=dist.all_to_all_single) as parts,
            ):
                gather_variadic(_variadic_tensor(case, ctx.rank))
            _, mine, *_ = parts.call_args.args
            found.append((mine.nbytes, shapes.call_count + parts.call_count))
        return found


def test_no_padding_is_sent() -> None:
    numels = [[6, 4, 0], [0, 0, 0], [9, 9, 9]]
    for rank, found in enumerate(run_ranks(_bytes_sent, world_size=3)):
        assert found == [(8 * numel[rank], 2) for numel in numels]


def _in_groups() -> list[list[int]] | None:
    """Gather in groups of some of the job's ranks: 0 and 2, 1 and 3."""
    with MeshConfig(data_parallel_replicate=2, data_parallel_shard=2).build() as ctx:
        mine = torch.tensor([ctx.rank, 10 + ctx.rank], device=ctx.device)[: 1 + ctx.rank // 2]
        gathered = gather_variadic(mine, ctx.group_for("regular", "dp_replicate"), dst=1)
        return None if gathered is None else [tensor.tolist() for tensor in gathered]


@pytest.mark.world_size(4)
def test_gather_variadic_counts_ranks_within_the_group(device: Device) -> None:
    found = run_ranks(_in_groups, world_size=4, device=device)
    assert found == [None, None, [[0], [2, 12]], [[1], [3, 13]]]


def _mismatch(kind: str) -> str:
    with MeshConfig(data_parallel_shard=-1).build() as ctx:
        mine = torch.zeros(2)
        if ctx.rank == 1:
            mine = {"dtype": torch.zeros(2, dtype=torch.int64), "dims": torch.zeros(2, 2)}.get(kind, mine)
        with pytest.raises(UserError) as caught:
            gather_variadic(mine)
        return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            "dtype",
            "rank 1 of the group has a torch.int64 tensor with 1 dims, but rank 0 has torch.float32 with 1; "
            "expected the same dtype and number of dims on all ranks, even for empty "
            "tensors.",
        ),
        (
            "dims",
            "rank 1 of the group has a torch.float32 tensor with 2 dims, but rank 0 has torch.float32 with 1; "
            "expected the same dtype and number of dims on all ranks, even for empty "
            "tensors.",
        ),
    ],
)
def test_a_mismatch_is_an_error_on_every_rank(kind: str, message: str) -> None:
    assert run_ranks(_mismatch, kind, world_size=3) == [message] * 3
