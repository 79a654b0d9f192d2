"""Compares each rank's part with torch's own split and gather, for random meshes, placements and sizes."""

import math
import random

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from d9d_dist import (
    MeshConfig,
    Region,
    UserError,
    copy_from_full_,
    full_tensor,
    indexed_blocks,
    is_first_replica,
    local_region,
    local_tensor,
    parallelize_hsdp,
)
from d9d_dist.shards import from_local, local_part, local_positions
from d9d_dist.testing import run_ranks


def test_a_whole_region_covers_its_shape() -> None:
    region = Region.whole((2, 3))
    assert region == Region((0, 0), (2, 3))
    assert region.num_elements == 6
    assert region.is_whole([2, 3])
    assert not region.is_whole([2, 4])
    assert Region.whole(()).num_elements == 1


def test_a_region_is_within_a_shape_if_no_offset_or_end_exceeds_it() -> None:
    assert Region((1, 0), (1, 3)).is_within((2, 3))
    assert Region((2, 0), (0, 3)).is_within((2, 3))
    assert not Region((1, 0), (2, 3)).is_within((2, 3))
    assert not Region((-1, 0), (1, 3)).is_within((2, 3))
    assert not Region((0,), (1,)).is_within((2, 3))


def test_the_region_of_a_tensor_is_a_view() -> None:
    tensor = torch.arange(12).view(3, 4)
    view = Region((1, 2), (2, 2)).of(tensor)
    assert view.tolist() == [[6, 7], [10, 11]]
    assert view.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
    assert tensor[Region((1, 2), (2, 2)).slices].tolist() == view.tolist()


def test_regions_with_changed_dims() -> None:
    region = Region((1, 2), (3, 4))
    assert region.replaced(1, 7, 8) == Region((1, 7), (3, 8))
    assert region.inserted(1, 7, 8) == Region((1, 7, 2), (3, 8, 4))
    assert region.removed(0) == Region((2,), (4,))
    assert region.permuted([1, 0]) == Region((2, 1), (4, 3))


def _random_region(draws: random.Random, shape: tuple[int, ...]) -> Region:
    ends = [sorted((draws.randint(0, size), draws.randint(0, size))) for size in shape]
    return Region(tuple(start for start, _ in ends), tuple(stop - start for start, stop in ends))


def test_the_intersection_has_the_common_elements() -> None:
    draws = random.Random(0)  # noqa: S311
    tensor = torch.arange(5 * 4 * 3).view(5, 4, 3)
    for _ in range(300):
        one, two = (_random_region(draws, (5, 4, 3)) for _ in range(2))
        expected = {*one.of(tensor).flatten().tolist()} & {*two.of(tensor).flatten().tolist()}
        common = one.intersect(two)
        assert (common is None) == (not expected)
        if common:
            assert {*common.of(tensor).flatten().tolist()} == expected
            assert torch.equal(common.relative_to(two).of(two.of(tensor)), common.of(tensor))
    assert Region((), ()).intersect(Region((), ())) == Region((), ())


def _split(positions: Tensor, placement: Placement, num_ranks: int, rank: int) -> Tensor:
    """Split the positions of one dim as the documentation of `Shard` and `_StridedShard` says."""
    if isinstance(placement, _StridedShard):
        chunks = positions.chunk(int(placement.split_factor))
        return torch.cat([torch.tensor_split(chunk, _bounds(len(chunk), num_ranks))[rank] for chunk in chunks])
    return torch.tensor_split(positions, _bounds(len(positions), num_ranks))[rank]


def _bounds(size: int, num_ranks: int) -> list[int]:
    chunk = -(-size // num_ranks)
    return [min(chunk * rank, size) for rank in range(1, num_ranks)]


def _random_case(draws: random.Random, mesh: DeviceMesh) -> tuple[tuple[int, ...], list[Placement]]:
    shape = tuple(draws.choice((1, 2, 3, 4, 5, 6, 7, 8)) for _ in range(draws.randint(1, 3)))
    placements: list[Placement] = []
    for axis in range(mesh.ndim):
        dim = draws.randrange(len(shape))
        # Only the first axis is strided: a later axis may shard the same dim, as FSDP2 over tensor parallelism does.
        strided = _StridedShard(dim, split_factor=draws.choice((2, 3)))
        placements.append(draws.choice([Replicate(), Shard(dim), Shard(dim), strided if axis == 0 else Shard(dim)]))
    return shape, placements


def _check_random_cases(mesh_shape: tuple[int, ...]) -> dict[str, int]:
    seen = {"empty": 0, "gaps": 0, "uneven": 0}
    with MeshConfig(data_parallel_shard=-1).build():
        mesh = init_device_mesh("cpu", mesh_shape)
        coordinate = mesh.get_coordinate()
        assert coordinate is not None
        draws = random.Random(math.prod(mesh_shape) + len(mesh_shape))  # noqa: S311
        for _ in range(60):
            shape, placements = _random_case(draws, mesh)
            full = torch.arange(math.prod(shape)).view(shape)
            expected = [torch.arange(size) for size in shape]
            for axis, placement in enumerate(placements):
                if isinstance(placement, Shard | _StridedShard):
                    dim = placement.dim
                    expected[dim] = _split(expected[dim], placement, mesh.size(axis), coordinate[axis])
            held = full[torch.meshgrid(*expected, indexing="ij")]
            tensor = DTensor.from_local(held, mesh, placements, run_check=False, shape=full.shape, stride=full.stride())
            assert isinstance(tensor, DTensor)
            case = f"{shape} {placements} at {coordinate}"
            assert [places.tolist() for places in local_positions(tensor)] == [list(e) for e in expected], case
            assert torch.equal(local_part(full, tensor), held), case
            if not any(
                isinstance(placement, _StridedShard) for placement in placements
            ):  # torch gathers only few strided shards
                assert torch.equal(full_tensor(from_local(held, tensor)), full), case
            copied = from_local(torch.zeros_like(held), tensor)
            copy_from_full_(copied, full)
            assert torch.equal(local_tensor(copied), held), case
            for block, index in indexed_blocks(tensor):
                assert torch.equal(block, index), case
            gaps = any(len(places) > 1 and bool((places.diff() != 1).any()) for places in expected)
            if gaps:
                with pytest.raises(UserError, match="rows that are not consecutive; expected one region per rank"):
                    local_region(tensor)
            else:
                sizes, offsets = compute_local_shape_and_global_offset(tensor.shape, mesh, tensor.placements)
                region = local_region(tensor)
                assert region.sizes == tuple(sizes), case
                assert not held.numel() or region.offsets == tuple(offsets), case
                assert torch.equal(region.of(full), held), case
            seen["empty"] += not held.numel()
            seen["gaps"] += gaps
            seen["uneven"] += any(size % mesh.size() for size in shape)
    return seen


@pytest.mark.parametrize("mesh_shape", [(4,), (2, 2), (2, 1, 2)], ids=str)
def test_random_shards_equal_splits_and_gathers_of_torch(mesh_shape: tuple[int, ...]) -> None:
    found = run_ranks(_check_random_cases, mesh_shape, world_size=4)
    assert all(sum(seen[kind] for seen in found) > 10 for kind in ("empty", "gaps", "uneven"))


def _fill_sharded_twice(wholes: list[Tensor]) -> list[tuple[Region, Tensor]]:
    with MeshConfig(data_parallel_shard=2, tensor_parallel=2).build() as ctx:
        mesh = ctx.mesh_for("dense")
        model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.Linear(8, 4, bias=False))
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        parallelize_hsdp(model, mesh["dp_cp_shard"], shard_axis="dp_cp_shard")
        results: list[tuple[Region, Tensor]] = []
        for parameter, whole in zip(model.parameters(), wholes, strict=True):
            copy_from_full_(parameter, whole)
            results.append((local_region(parameter), full_tensor(parameter)))
            assert not results[-1][1].requires_grad
        return results


def test_fsdp_over_tensor_parallelism_has_one_region() -> None:
    wholes = [torch.randn(8, 4), torch.randn(4, 8)]
    found = run_ranks(_fill_sharded_twice, wholes, world_size=4)
    for results in found:
        assert all(torch.equal(result, whole) for (_, result), whole in zip(results, wholes, strict=True))
    assert [results[0][0].offsets[0] for results in found] == [0, 4, 2, 6]


def _copy_and_gather(whole: Tensor) -> list[Tensor]:
    with MeshConfig(data_parallel_shard=2, data_parallel_replicate=2).build() as ctx:
        mesh = ctx.mesh_for("dense")["dp_replicate", "dp_cp_shard"]
        results: list[Tensor] = []
        for placements in ([Replicate(), Shard(0)], [Shard(0), Shard(1)], [Shard(1), Shard(1)], [Replicate()] * 2):
            target = distribute_tensor(torch.zeros_like(whole), mesh, placements)
            copy_from_full_(target, whole)
            results.append(full_tensor(target))
        return results


def test_shards_of_any_placement_are_filled() -> None:
    whole = torch.randn(3, 7)  # uneven; one rank on the first axis gets an empty shard
    for results in run_ranks(_copy_and_gather, whole, world_size=4):
        assert all(torch.equal(result, whole) for result in results)


def _fill_packed(bits: Tensor, dtype: torch.dtype) -> Tensor:
    with MeshConfig(data_parallel_shard=2).build() as ctx:
        mesh = ctx.mesh_for("flat")
        target = DTensor.from_local(torch.zeros_like(bits[:2]).view(dtype), mesh, [Shard(0)], run_check=False)
        copy_from_full_(target, bits.view(dtype))
        return local_tensor(target).view(torch.uint8)


@pytest.mark.parametrize("dtype", [torch.float4_e2m1fn_x2, torch.float8_e4m3fn], ids=str)
def test_shards_of_packed_values_keep_their_bits(dtype: torch.dtype) -> None:
    bits = torch.arange(24, dtype=torch.uint8).view(4, 6) * 10
    parts = run_ranks(_fill_packed, bits, dtype)
    assert torch.equal(torch.cat(parts), bits)


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (2, 0)], ids=str)
def test_a_plain_tensor_is_its_whole_region(shape: tuple[int, ...]) -> None:
    parameter = nn.Parameter(torch.zeros(shape))
    assert local_region(parameter) == Region.whole(shape)
    assert local_tensor(parameter) is parameter
    assert from_local(parameter, parameter) is parameter
    assert not full_tensor(parameter).requires_grad
    copy_from_full_(parameter, torch.ones(shape))
    assert parameter.is_leaf
    assert torch.equal(local_part(torch.ones(shape), parameter), parameter)


def test_blocks_of_a_shard_have_at_most_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.arange(4 * 3 * 5).view(4, 3, 5)
    for limit in (1, 4, 5, 11, 15, 31, 60):
        monkeypatch.setattr("d9d_dist.shards._BLOCK_ELEMENTS", limit)
        blocks = list(indexed_blocks(tensor))
        assert all(torch.equal(block, index) and block.numel() <= limit for block, index in blocks)
        assert torch.equal(torch.cat([block.flatten() for block, _ in blocks]), tensor.flatten())


def _partial_region() -> None:
    with MeshConfig(data_parallel_shard=2).build() as ctx:
        local_region(DTensor.from_local(torch.zeros(2), ctx.mesh_for("flat"), [Partial()]), "weight")


def test_partial_placement_is_refused() -> None:
    with pytest.raises(Exception, match=r"weight has the placements .*; expected only Shard and Replicate"):
        run_ranks(_partial_region)


def _outside_of_the_mesh() -> tuple[Region, Tensor, bool]:
    with MeshConfig(data_parallel_shard=2).build() as ctx:
        mesh = DeviceMesh(ctx.device.type, [0])
        tensor = DTensor.from_local(torch.zeros(2, 3), mesh, [Shard(0)])
        assert isinstance(tensor, DTensor)
        return local_region(tensor), local_part(torch.zeros(2, 3), tensor), is_first_replica(tensor)


def test_rank_outside_the_mesh_has_an_empty_region() -> None:
    (inner, part, owns), (outer, nothing, owns_nothing) = run_ranks(_outside_of_the_mesh)
    assert (inner, part.shape, owns) == (Region((0, 0), (2, 3)), (2, 3), True)
    assert (outer, nothing.shape, owns_nothing) == (Region((0, 0), (0, 0)), (0, 0), False)


def _first_replicas() -> list[bool]:
    with MeshConfig(data_parallel_shard=-1).build():
        mesh = init_device_mesh("cpu", (2, 2))
        cases = ([Replicate(), Replicate()], [Replicate(), Shard(0)], [Shard(0), Shard(1)])
        return [is_first_replica(distribute_tensor(torch.zeros(4, 4), mesh, placements)) for placements in cases]


def test_each_shard_has_one_first_replica() -> None:
    found = run_ranks(_first_replicas, world_size=4)
    assert [[ranks[case] for ranks in found] for case in range(3)] == [
        [True, False, False, False],
        [True, True, False, False],
        [True, True, True, True],
    ]
