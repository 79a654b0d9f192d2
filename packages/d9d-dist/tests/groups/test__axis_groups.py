from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from d9d_dist import MeshConfig
from d9d_dist.testing import Device, run_ranks

DEGREES = {
    "pipeline_parallel": 2,
    "data_parallel_shard": 2,
    "tensor_parallel": 2,
    "expert_parallel": 2,
}


def _axes() -> dict[str, tuple[list[int], int]]:
    """Return the ranks of each axis of each domain and this rank's coordinate, after comparison with torch's meshes."""
    config = MeshConfig.model_validate(DEGREES)
    with config.build() as ctx:
        axes = {}
        for domain, sizes in config.domains().items():
            mesh = ctx.mesh_for(domain)
            theirs = init_device_mesh(ctx.device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
            assert torch.equal(mesh.mesh, theirs.mesh)
            for axis in sizes:
                ranks = dist.get_process_group_ranks(mesh[axis].get_group())
                assert ranks == dist.get_process_group_ranks(ctx.group_for(domain, axis))
                assert ranks == dist.get_process_group_ranks(theirs[axis].get_group())
                assert (ctx.size(domain, axis), ctx.coordinate(domain, axis)) == (len(ranks), ranks.index(ctx.rank))
                total = torch.tensor(float(ctx.rank), device=ctx.device)
                dist.all_reduce(total, group=mesh.get_group(axis))
                assert total.item() == sum(ranks)
                axes[f"{domain}.{axis}"] = (ranks, ctx.coordinate(domain, axis))
        return axes


@pytest.mark.world_size(8)
def test_axes_equal_the_meshes_of_torch_and_their_groups_communicate(device: Device) -> None:
    ranks = run_ranks(_axes, world_size=8, device=device)
    assert ranks[5]["expert.ep_shard"] == ([4, 5], 1)
    assert ranks[5]["dense.dp_cp_shard"] == ([5, 7], 0)
    assert ranks[5]["batch.pp"] == ([1, 5], 1)


def _num_groups() -> int:
    with MeshConfig.model_validate(DEGREES).build() as ctx:
        # pp, dp, tp, the expert replicas (every second rank of a stage), a single rank, and all ranks.
        num_groups = len(dist.distributed_c10d._world.pg_map)
        assert ctx.group_for("regular", "tp") is ctx.group_for("dense", "tp") is ctx.group_for("batch", "tp")
        assert ctx.group_for("regular", "tp") is ctx.group_for("expert", "ep_shard")  # the same ranks in another domain
        assert ctx.group_for("regular", "pp") is ctx.mesh_for("batch")["pp"].get_group()
        assert ctx.group_for("regular", "cp_shard") is ctx.group_for("dense", "dp_replicate")
        assert ctx.group_for("batch", "pp", "dp", "tp") is dist.group.WORLD
        assert len(dist.distributed_c10d._world.pg_map) == num_groups
        stage = ctx.group_for("batch", "tp", "dp")
        assert len(dist.distributed_c10d._world.pg_map) == num_groups + 1
        assert ctx.group_for("expert", "ep_replicate", "ep_shard") is stage
        return num_groups


@pytest.mark.world_size(8)
def test_equal_sets_of_ranks_have_one_group(device: Device) -> None:
    # All ranks, a single rank, pp, tp and dp; the groups of the expert domain are among them.
    assert run_ranks(_num_groups, world_size=8, device=device) == [5] * 8


def _joined_axes_are_one() -> list[bool]:
    with MeshConfig(data_parallel_shard=2, context_parallel_shard=2, tensor_parallel=2).build() as ctx:
        return [
            ctx.group_for("regular", "dp_shard", "cp_shard") is ctx.mesh_for("dense").get_group("dp_cp_shard"),
            ctx.group_for("batch", "cp", "dp") is ctx.mesh_for("dense").get_group("dp_cp_shard"),
            ctx.group_for("regular", "dp_shard") is not ctx.group_for("regular", "cp_shard"),
        ]


def test_adjacent_axes_form_the_axis_of_another_domain() -> None:
    assert run_ranks(_joined_axes_are_one, world_size=8) == [[True] * 3] * 8


def _groups_over_several_axes() -> list[list[int]]:
    with MeshConfig.model_validate(DEGREES).build() as ctx:
        groups = [ctx.group_for("regular", "tp", "pp"), ctx.group_for("batch", "dp", "tp")]
        total = torch.ones((), device=ctx.device)
        for group in groups:
            dist.all_reduce(total, group=group)
        assert total.item() == 16.0
        return [dist.get_process_group_ranks(group) for group in groups]


def test_a_group_may_span_nonadjacent_axes() -> None:
    for rank, (corners, stage) in enumerate(run_ranks(_groups_over_several_axes, world_size=8)):
        place = rank >> 2, rank >> 1 & 1, rank & 1
        assert corners == [pp << 2 | place[1] << 1 | tp for pp, tp in product(range(2), range(2))]
        assert stage == [place[0] << 2 | dp << 1 | tp for dp, tp in product(range(2), range(2))]


def _slices_have_one_root() -> bool:
    with MeshConfig.model_validate(DEGREES).build() as ctx:
        dense = ctx.mesh_for("dense")
        roots = [dense[axes]._get_root_mesh() for axes in ("tp", ("dp_replicate", "dp_cp_shard"), "dp_cp_shard")]
        flat = dense["dp_replicate", "dp_cp_shard"]._flatten("dp")
        assert flat.size() == 2
        return all(root is dense for root in roots)


def test_slices_of_a_domain_share_a_root_mesh_and_can_be_flattened() -> None:
    assert all(run_ranks(_slices_have_one_root, world_size=8))
