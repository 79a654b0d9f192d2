from typing import Any

import torch
from torch.distributed.tensor import Shard, distribute_tensor

from d9d_dist import MeshConfig, UserError
from d9d_dist.collectives.tree_gather import all_gather_trees
from d9d_dist.testing import run_ranks


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
