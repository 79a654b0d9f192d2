import dataclasses

import pytest
import torch

from d9d_dist import DistributedContext, MeshConfig
from d9d_dist.testing import run_ranks
from d9d_loop.resilience import HealthConfig, HealthError, check_health
from d9d_loop.resilience.health_check import RankHealth, find_slow

_SMALL = HealthConfig(matrix_size=65, memory_mib=1, message_mib=1)
_RANK = RankHealth(0, "a", "cpu", 0.01, 0.01, 0.01, 0.01, ())


def test_disabled_checks_do_nothing(ctx: DistributedContext) -> None:
    assert check_health(HealthConfig(enabled=False), ctx=ctx) is None


def test_one_process_has_no_links(ctx: DistributedContext) -> None:
    report = check_health(_SMALL, ctx=ctx)
    assert report is not None
    (rank,) = report.ranks
    assert rank.compute_seconds > 0
    assert rank.memory_seconds > 0
    assert rank.link_seconds == 0
    assert "health of 1 ranks" in str(report)


def test_the_error_names_a_device_that_miscalculates(ctx: DistributedContext, monkeypatch: pytest.MonkeyPatch) -> None:
    matmul = torch.Tensor.__matmul__

    def wrong(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        product = matmul(a, b)
        product[3, 5] += 1
        return product

    monkeypatch.setattr(torch.Tensor, "__matmul__", wrong)
    with pytest.raises(HealthError, match=r"- rank 0 \(cpu of .*\): computing returned wrong values\nStart the job"):
        check_health(_SMALL, ctx=ctx)


def _check(bad: int | None) -> str:
    with MeshConfig(data_parallel_shard=-1).build() as ctx:
        if ctx.rank != bad:
            try:
                report = check_health(_SMALL, ctx=ctx)
            except HealthError as error:
                return str(error)
            assert report is not None
            assert [rank.rank for rank in report.ranks] == [0, 1, 2]
            assert all(rank.link_seconds > 0 and rank.all_reduce_seconds > 0 for rank in report.ranks)
            return ""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.Tensor, "__matmul__", _out_of_memory)
            try:
                check_health(_SMALL, ctx=ctx)
            except HealthError as error:
                return str(error)
    raise AssertionError("the health check found nothing")


def _out_of_memory(*_: object) -> torch.Tensor:
    raise torch.OutOfMemoryError("out of memory")


def test_the_health_check_passes_on_several_ranks() -> None:
    assert run_ranks(_check, None, world_size=3) == [""] * 3


def test_all_ranks_name_the_one_that_fails() -> None:
    messages = run_ranks(_check, 1, world_size=3)
    assert len(set(messages)) == 1
    assert "rank 1 (cpu of " in messages[0]
    assert "computing failed: out of memory" in messages[0]


def test_slow_ranks_are_reported_with_their_machine() -> None:
    ranks = [dataclasses.replace(_RANK, rank=rank, host=host) for rank, host in enumerate("aabb")]
    assert not find_slow(ranks, factor=3)
    ranks[2] = dataclasses.replace(ranks[2], link_seconds=0.05, all_reduce_seconds=0.05)
    ranks[3] = dataclasses.replace(ranks[3], compute_seconds=0.031)
    ranks[1] = dataclasses.replace(ranks[1], data_seconds=0.2)
    assert find_slow(ranks, factor=3, step_seconds=3.9) == {
        ("compute", 3): "slow compute of rank 3 (cpu of b): 31.0 ms, 3.1 times the median.",
        ("link", 2): "slow link of ranks 1 to 2 (a to b): 50.0 ms, 5.0 times the median.",
        ("data", 1): "slow data of rank 1 (cpu of a): 200.0 ms.",
    }
    assert ("data", 1) not in find_slow(ranks, factor=3, step_seconds=4.1)  # less than a twentieth of a step
    assert not find_slow([dataclasses.replace(rank, compute_seconds=1e-6 * rank.rank) for rank in ranks[:2]], factor=3)
