"""All ranks compute the same plan; the first rank that holds a part writes it."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor import empty as empty_dtensor

from d9d_dist import DistributedContext, MeshConfig, Region
from d9d_dist.testing import run_ranks
from d9d_state import StateError, TensorInfo, check_saveable
from d9d_state.checkpoint.save_plan import SavePlan, SavePlanner, local_parts, part_key


def test_tensors_that_cannot_be_saved_are_found_before_a_save() -> None:
    check_saveable({"a": torch.ones(2, 3), "half": torch.ones(2, dtype=torch.bfloat16)})
    with pytest.raises(ValueError, match=r"a is of type float; expected a tensor\. Pass other values in state=\."):
        check_saveable({"a": 1.0})  # ty: ignore[invalid-argument-type]
    with pytest.raises(ValueError, match=r"a is sparse \(torch.sparse_coo\); expected a dense tensor"):
        check_saveable({"a": torch.eye(2).to_sparse()})
    with pytest.raises(ValueError, match=r"^a: safetensors files do not support torch\.complex128; use complex64, or"):
        check_saveable({"a": torch.ones(2, dtype=torch.complex128)})


def test_one_process_writes_everything() -> None:
    planner = SavePlanner()
    tensors = {"a": torch.ones(2, 3), "scalar": torch.ones(()), "empty": torch.ones(0, 3)}
    plan = planner.plan(tensors, None)
    assert plan.parts == ((("a", Region((0, 0), (2, 3))), ("scalar", Region((), ()))),)
    assert plan.tensors == {name: TensorInfo.of(tensor) for name, tensor in tensors.items()}
    parts = local_parts(tensors, plan, 0)
    assert sum(part.nbytes for part in parts.values()) == 28
    assert {key: part.data_ptr() for key, part in parts.items()} == {
        "a@0,0": tensors["a"].data_ptr(),
        "scalar@": tensors["scalar"].data_ptr(),
    }


def test_plan_is_recomputed_when_tensors_change() -> None:
    planner = SavePlanner()
    first = planner.plan({"a": torch.ones(2, 3)}, None)
    assert planner.plan({"a": torch.zeros(2, 3)}, None) is first
    for tensors in ({"a": torch.ones(3, 2)}, {"a": torch.ones(3, 2, dtype=torch.int32)}, {"b": torch.ones(3, 2)}, {}):
        made = planner.num_plans
        plan = planner.plan(tensors, None)
        assert planner.num_plans == made + 1
        assert plan.tensors == {name: TensorInfo.of(tensor) for name, tensor in tensors.items()}


def _tensors(ctx: DistributedContext) -> dict[str, Tensor]:
    dense = ctx.mesh_for("dense")
    both = dense["dp_replicate", "dp_cp_shard"]
    shard = dense["dp_cp_shard"]
    tensors: dict[str, Tensor] = {
        "uneven": distribute_tensor((torch.arange(21.0).view(7, 3) / 7), both, [Replicate(), Shard(0)]),
        "less than ranks": distribute_tensor((torch.arange(3.0).view(1, 3) / 7), both, [Replicate(), Shard(0)]),
        "both dims": distribute_tensor((torch.arange(24.0).view(4, 6) / 7), both, [Shard(0), Shard(1)]),
        "empty": empty_dtensor(0, 4, device_mesh=both, placements=[Replicate(), Shard(0)]),
        "of one group": distribute_tensor(torch.arange(8.0) / 7, shard, [Shard(0)]),
        "plain": torch.arange(5.0),
        "scalar": torch.tensor(3.0),
        f"stage {ctx.rank // 2}": torch.full((2,), float(ctx.rank // 2)),
    }
    # Replicas that differ: plain tensors, and shards whose replicas differ.
    tensors["differs"] = torch.full((64,), float(ctx.rank))
    local = torch.full((64, 1), float(ctx.rank))
    tensors["differs, sharded"] = DTensor.from_local(local, both, [Replicate(), Shard(0)])
    tensors["differs, replicated"] = DTensor.from_local(local, both, [Replicate(), Replicate()])
    return {**tensors, **{f"replicated {index}": torch.full((64,), float(index)) for index in range(8)}}


def _plan() -> dict[str, Any]:
    with MeshConfig(data_parallel_shard=2, data_parallel_replicate=2).build() as ctx:
        planner = SavePlanner()
        tensors = _tensors(ctx)
        plan = planner.plan(tensors, ctx)
        own = {key: part.clone() for key, part in local_parts(tensors, plan, ctx.rank).items()}
        again = planner.plan(_tensors(ctx), ctx) is plan
        # A change on one rank makes all ranks compute a new plan.
        other = planner.plan({**tensors, **({"new": torch.ones(1)} if ctx.rank == 2 else {})}, ctx)
        messages = []
        mesh = ctx.mesh_for("dense")["dp_cp_shard"]
        for wrong in (
            {"a": torch.ones(2 + ctx.rank // 3)},
            {"a": DTensor.from_local(torch.ones(2), mesh, [Shard(0)])} if ctx.rank % 2 else {},
            {"a": DTensor.from_local(torch.ones(4), mesh, [Partial()])},
            {"a": torch.ones(1, dtype=torch.complex128)} if ctx.rank == 1 else {},
            {"a": 3} if ctx.rank == 2 else {},
        ):
            bad: Any = wrong
            with pytest.raises(StateError) as caught:
                planner.plan(bad, ctx)
            messages.append(str(caught.value))
        return {
            "plan": plan,
            "own": own,
            "again": again,
            "plans": planner.num_plans,
            "other": other.digest,
            "messages": messages,
        }


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return run_ranks(_plan, world_size=4)


def test_all_ranks_compute_the_same_plan(found: list[dict[str, Any]]) -> None:
    plan: SavePlan = found[0]["plan"]
    assert all(each["plan"] == plan and each["again"] and each["plans"] == 2 for each in found)
    assert len({each["other"] for each in found} - {plan.digest}) == 1
    written = [part for parts in plan.parts for part in parts]
    assert len(written) == len(set(written))
    wholes = {name: torch.full(info.shape, torch.nan) for name, info in plan.tensors.items()}
    for rank, parts in enumerate(plan.parts):
        assert found[rank]["own"].keys() == {part_key(name, box) for name, box in parts}
        for name, box in parts:
            place = tuple(slice(start, start + size) for start, size in zip(box.offsets, box.sizes, strict=True))
            wholes[name][place] = found[rank]["own"][part_key(name, box)]
    assert torch.equal(wholes["uneven"], (torch.arange(21.0).view(7, 3) / 7))
    assert torch.equal(wholes["less than ranks"], (torch.arange(3.0).view(1, 3) / 7))
    assert torch.equal(wholes["both dims"], (torch.arange(24.0).view(4, 6) / 7))
    assert torch.equal(wholes["of one group"], torch.arange(8.0) / 7)
    assert torch.equal(wholes["plain"], torch.arange(5.0))
    assert (wholes["scalar"].item(), wholes["empty"].shape) == (3.0, (0, 4))
    assert [wholes[f"stage {stage}"].tolist() for stage in (0, 1)] == [[0.0, 0.0], [1.0, 1.0]]
    assert set(wholes["differs"].tolist()) == {0.0}
    assert set(wholes["differs, replicated"].flatten().tolist()) == {0.0}
    assert wholes["differs, sharded"].flatten().tolist() == [0.0] * 64 + [1.0] * 64
    assert all(wholes[f"replicated {index}"].tolist() == [float(index)] * 64 for index in range(8))


def test_inconsistent_tensors_raise_on_every_rank(found: list[dict[str, Any]]) -> None:
    shape, hole, partial, dtype, kind = found[0]["messages"]
    assert all(each["messages"] == found[0]["messages"] for each in found)
    assert shape.startswith(
        "a is [3] float32 on rank 3, [2] float32 on rank 0; expected equal shapes and dtypes on all ranks"
    )
    assert "a [4] float32 cannot be assembled from the ranks' shards: its chunks contain 2 of 4 elements" in hole
    assert partial.startswith("ranks 0, 1, 2, 3: ")
    assert dtype.startswith("rank 1: safetensors files do not support torch.complex128")
    assert kind == "rank 2: a is of type int; expected a tensor. Pass other values in state=."
