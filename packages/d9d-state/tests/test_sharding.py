import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from d9d_dist import MeshConfig, parallelize_hsdp
from d9d_dist.testing import run_ranks
from d9d_state._sharding import copy_whole, gather_whole


def _copy_and_gather(whole: Tensor) -> list[Tensor]:
    with MeshConfig(data_parallel_shard=2, data_parallel_replicate=2).build() as ctx:
        mesh = ctx.mesh_for("dense")["dp_replicate", "dp_cp_shard"]
        results: list[Tensor] = []
        for placements in ([Replicate(), Shard(0)], [Shard(0), Shard(1)], [Shard(1), Shard(1)], [Replicate()] * 2):
            target = distribute_tensor(torch.zeros_like(whole), mesh, placements)
            copy_whole(target, whole)
            results.append(gather_whole(target))
        return results


def test_shards_of_any_placement_are_filled() -> None:
    whole = torch.arange(21.0).view(3, 7)  # uneven, and one rank of the first dim gets nothing
    for results in run_ranks(_copy_and_gather, whole, world_size=4):
        assert all(torch.equal(result, whole) for result in results)


def _fill_sharded_twice(wholes: list[Tensor]) -> list[Tensor]:
    with MeshConfig(data_parallel_shard=2, tensor_parallel=2).build() as ctx:
        mesh = ctx.mesh_for("dense")
        model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.Linear(8, 4, bias=False))
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        parallelize_hsdp(model, mesh["dp_cp_shard"], shard_axis="dp_cp_shard")
        results: list[Tensor] = []
        for parameter, whole in zip(model.parameters(), wholes, strict=True):
            copy_whole(parameter, whole)
            results.append(gather_whole(parameter))
        return results


def test_dims_that_are_sharded_twice_are_filled() -> None:
    wholes = [torch.randn(8, 4), torch.randn(4, 8)]
    for results in run_ranks(_fill_sharded_twice, wholes, world_size=4):
        assert all(torch.equal(result, whole) for result, whole in zip(results, wholes, strict=True))


def _copy_into_a_sum() -> None:
    with MeshConfig(data_parallel_shard=2).build() as ctx:
        target = DTensor.from_local(torch.zeros(2), ctx.mesh_for("flat"), [Partial()])
        copy_whole(target, torch.ones(2))


def test_a_sum_that_is_not_reduced_is_refused() -> None:
    with pytest.raises(Exception, match="expected Shard and Replicate only"):
        run_ranks(_copy_into_a_sum)


def test_plain_tensors_are_converted_and_stay_leaves() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    copy_whole(parameter, torch.tensor([1.0, 2.0], dtype=torch.float64))
    assert parameter.tolist() == [1.0, 2.0]
    assert parameter.is_leaf
    assert not gather_whole(parameter).requires_grad
