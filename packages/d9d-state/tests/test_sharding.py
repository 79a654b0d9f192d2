import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from d9d_dist import MeshConfig, parallelize_hsdp
from d9d_dist.testing import run_ranks
from d9d_state._sharding import gather_whole, local_part
from d9d_state.mapper.region import Region


def _fill(target: Tensor, whole: Tensor) -> None:
    region, local = local_part(target)
    assert not local.requires_grad
    local.copy_(region.of(whole))


def _copy_and_gather(whole: Tensor) -> list[Tensor]:
    with MeshConfig(data_parallel_shard=2, data_parallel_replicate=2).build() as ctx:
        mesh = ctx.mesh_for("dense")["dp_replicate", "dp_cp_shard"]
        results: list[Tensor] = []
        for placements in ([Replicate(), Shard(0)], [Shard(0), Shard(1)], [Shard(1), Shard(1)], [Replicate()] * 2):
            target = distribute_tensor(torch.zeros_like(whole), mesh, placements)
            _fill(target, whole)
            results.append(gather_whole(target))
        return results


def test_shards_of_any_placement_are_loaded() -> None:
    whole = torch.randn(3, 7)  # uneven; one rank on the first axis gets an empty shard
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
            _fill(parameter, whole)
            results.append(gather_whole(parameter))
        return results


def test_dims_sharded_on_two_axes_are_loaded() -> None:
    wholes = [torch.randn(8, 4), torch.randn(4, 8)]
    for results in run_ranks(_fill_sharded_twice, wholes, world_size=4):
        assert all(torch.equal(result, whole) for result, whole in zip(results, wholes, strict=True))


def _copy_into_a_sum() -> None:
    with MeshConfig(data_parallel_shard=2).build() as ctx:
        target = DTensor.from_local(torch.zeros(2), ctx.mesh_for("flat"), [Partial()])
        local_part(target)


def test_partial_placement_is_refused() -> None:
    with pytest.raises(Exception, match="expected Shard and Replicate only"):
        run_ranks(_copy_into_a_sum)


def test_plain_tensor_is_its_whole_region() -> None:
    parameter = nn.Parameter(torch.zeros(2, 3))
    region, local = local_part(parameter)
    assert region == Region((0, 0), (2, 3))
    local.fill_(1.0)
    assert parameter.sum() == 6.0
    assert parameter.is_leaf
    assert not gather_whole(parameter).requires_grad


def test_meta_tensor_is_refused() -> None:
    with pytest.raises(ValueError, match="the model is on the meta device; materialize it before loading its state"):
        local_part(torch.empty(2, device="meta"))


def _outside_of_the_mesh() -> Region:
    with MeshConfig(data_parallel_shard=2).build() as ctx:
        mesh = DeviceMesh(ctx.device.type, [0])
        return local_part(DTensor.from_local(torch.zeros(2, 3), mesh, [Shard(0)]))[0]


def test_rank_outside_the_mesh_has_an_empty_region() -> None:
    assert run_ranks(_outside_of_the_mesh) == [Region((0, 0), (2, 3)), Region((0, 0), (0, 0))]
