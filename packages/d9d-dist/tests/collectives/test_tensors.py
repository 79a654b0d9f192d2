from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from d9d_dist import MeshConfig, UserError
from d9d_dist.collectives.tensors import (
    all_gather,
    all_to_all,
    gather,
    reduce_scatter,
)
from d9d_dist.testing import Device, run_ranks

SHAPE = (4, 6, 8)
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool]


def _tensor(rank: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return a rank's tensor of small integers, exact in every dtype and sum; transposed, so not contiguous."""
    draws = torch.Generator().manual_seed(rank)
    return torch.randint(0, 8, tuple(reversed(SHAPE)), generator=draws).to(dtype).permute(2, 1, 0)


def _tensors(size: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [_tensor(rank, dtype) for rank in range(size)]


def _cases(size: int, dtype: torch.dtype) -> dict[str, tuple[Callable[..., Tensor | None], Callable[[int], Any]]]:
    """Return, by name, a collective and its expected result on a rank, computed from the tensors of all ranks."""
    whole, last = _tensors(size, dtype), size - 1

    def sums(rank: int, dim: int) -> Tensor:
        total = torch.stack(_tensors(size, torch.int64)).sum(dim=0).to(dtype)
        return total.chunk(size, dim=dim)[rank]

    return {
        "all_gather": (all_gather, lambda rank: torch.cat(whole)),
        "all_gather dim": (lambda x: all_gather(x, dim=1), lambda rank: torch.cat(whole, dim=1)),
        "all_gather last": (lambda x: all_gather(x, dim=-1), lambda rank: torch.cat(whole, dim=-1)),
        "all_gather stack": (lambda x: all_gather(x, stack=True), lambda rank: torch.stack(whole)),
        "all_gather stack last": (lambda x: all_gather(x, dim=-1, stack=True), lambda rank: torch.stack(whole, dim=-1)),
        "gather": (gather, lambda rank: None if rank else torch.cat(whole)),
        "gather dim": (
            lambda x: gather(x, dst=last, dim=-2),
            lambda rank: torch.cat(whole, dim=-2) if rank == last else None,
        ),
        "gather stack": (lambda x: gather(x, dim=1, stack=True), lambda rank: None if rank else torch.stack(whole, 1)),
        "reduce_scatter": (reduce_scatter, lambda rank: sums(rank, 0)),
        "reduce_scatter dim": (lambda x: reduce_scatter(x, dim=-1), lambda rank: sums(rank, -1)),
        "reduce_scatter max": (
            lambda x: reduce_scatter(x, op=dist.ReduceOp.MAX),
            lambda rank: torch.stack(_tensors(size, torch.int64)).amax(dim=0).to(dtype).chunk(size)[rank],
        ),
        "all_to_all": (all_to_all, lambda rank: torch.cat([x.chunk(size)[rank] for x in whole])),
    }


def _failing_cases(dtype: torch.dtype) -> dict[str, str]:
    """Return the cases in which a collective's result differs from the expected one."""
    with MeshConfig(data_parallel_shard=-1).build() as ctx:
        failures = {}
        for name, (collective, expect) in _cases(ctx.world_size, dtype).items():
            if dtype == torch.bool and name.startswith("reduce"):
                continue
            mine = _tensor(ctx.rank, dtype).to(ctx.device)
            found, expected = collective(mine), expect(ctx.rank)
            if found is None or expected is None:
                is_right = found is expected
            else:
                is_right = torch.equal(found.cpu(), expected) and found.is_contiguous() and found.dtype == dtype
            if not is_right or not torch.equal(mine.cpu(), _tensor(ctx.rank, dtype)):
                failures[name] = f"got {found}, expected {expected}"
        return failures


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_collectives_equal_one_process(dtype: torch.dtype, device: Device) -> None:
    assert run_ranks(_failing_cases, dtype, device=device) == [{}] * 2


@pytest.mark.world_size(4)
@pytest.mark.parametrize("world_size", [1, 4])
def test_collectives_equal_one_process_for_other_world_sizes(world_size: int, device: Device) -> None:
    assert run_ranks(_failing_cases, torch.float64, world_size=world_size, device=device) == [{}] * world_size


def _in_groups() -> dict[str, Any]:
    """Run all cases in groups of some of the job's ranks: 0 and 2, 1 and 3."""
    with MeshConfig(data_parallel_replicate=2, data_parallel_shard=2).build() as ctx:
        group = ctx.group_for("regular", "dp_replicate")
        mine = torch.tensor([ctx.rank, 10 + ctx.rank], device=ctx.device)
        return {
            "all_gather": all_gather(mine, group).tolist(),
            "gather": _as_list(gather(mine, group, dst=1)),
            "reduce_scatter": reduce_scatter(mine, group).tolist(),
            "all_to_all": all_to_all(mine, group).tolist(),
        }


def _as_list(tensor: Tensor | None) -> list[int] | None:
    return None if tensor is None else tensor.tolist()


@pytest.mark.world_size(4)
def test_collectives_count_ranks_within_the_group(device: Device) -> None:
    for rank, found in enumerate(run_ranks(_in_groups, world_size=4, device=device)):
        low, high = rank % 2, rank % 2 + 2
        is_last = rank == high
        assert found == {
            "all_gather": [low, 10 + low, high, 10 + high],
            "gather": [low, 10 + low, high, 10 + high] if is_last else None,
            "reduce_scatter": [20 + low + high] if is_last else [low + high],
            "all_to_all": [10 + low, 10 + high] if is_last else [low, high],
        }


def _scalars_gathered() -> list[int]:
    with MeshConfig(data_parallel_shard=-1).build() as ctx:
        return all_gather(torch.tensor(ctx.rank, device=ctx.device), stack=True).tolist()


def test_0_dim_tensors_are_stacked(device: Device) -> None:
    assert run_ranks(_scalars_gathered, device=device) == [[0, 1]] * 2


SEND_SIZES = [[2, 0, 1], [0, 0, 0], [3, 1, 2]]  # rows that each rank sends to each rank


def _uneven_all_to_all() -> list[list[int]]:
    with MeshConfig(data_parallel_shard=-1).build() as ctx:
        send = SEND_SIZES[ctx.rank]
        rows = [[ctx.rank, to] for to in range(3) for _ in range(send[to])]
        mine = torch.tensor(rows, dtype=torch.int64, device=ctx.device).view(-1, 2)
        receive = [sizes[ctx.rank] for sizes in SEND_SIZES]
        return all_to_all(mine, send_sizes=send, receive_sizes=receive).tolist()


@pytest.mark.world_size(3)
def test_all_to_all_with_uneven_sizes(device: Device) -> None:
    for rank, rows in enumerate(run_ranks(_uneven_all_to_all, world_size=3, device=device)):
        assert rows == [[source, rank] for source in range(3) for _ in range(SEND_SIZES[source][rank])]


def _refusals() -> None:
    with MeshConfig(data_parallel_shard=-1).build():
        x = torch.zeros(4, 5)
        with pytest.raises(
            UserError,
            match=r"got a tensor of shape \(4, 5\) to split over 2 ranks on dim -1, whose size is 5; expected a "
            r"multiple of 2\.",
        ):
            reduce_scatter(x, dim=-1)
        with pytest.raises(UserError, match=r"shape \(5, 4\) to split over 2 ranks on dim 0, whose size is 5"):
            all_to_all(x.mT)
        with pytest.raises(
            UserError, match=r"got send_sizes only; expected both send_sizes and receive_sizes, or neither for equal"
        ):
            all_to_all(x, send_sizes=[1, 3])
        with pytest.raises(UserError, match=r"got receive_sizes only; expected both"):
            all_to_all(x, receive_sizes=[1, 3])
        with pytest.raises(
            UserError, match=r"got 1 receive_sizes in a group of 2 ranks; expected one size for each ran"
        ):
            all_to_all(x, send_sizes=[1, 3], receive_sizes=[1])
        with pytest.raises(
            UserError,
            match=r"got send_sizes = \[1, 2\], 3 rows in total, with a tensor of shape \(4, 5\); expected 4 rows\.",
        ):
            all_to_all(x, send_sizes=[1, 2], receive_sizes=[1, 2])


def test_shapes_and_sizes_that_do_not_match_are_refused() -> None:
    run_ranks(_refusals)
