import gzip
import json
import re
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from d9d_dist import DistributedContext, MeshConfig
from d9d_dist.testing import run_ranks
from d9d_loop import DataReady, Events, StepDone
from d9d_loop.job.profiler import ProfileConfig, Profiler


def _done(step: int) -> StepDone:
    return StepDone(step, torch.ones(()), torch.ones(()), 0.1, nullcontext)


def _train(folder: Path, config: ProfileConfig, *, first_step: int = 0, steps: int = 6) -> None:
    ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else -1
    with MeshConfig(data_parallel_shard=ranks).build() as ctx:
        events = Events()
        with Profiler(config, folder, ctx, num_steps=first_step + steps) as profiler:
            events.subscribe(profiler)
            events.emit(DataReady(first_step, 1, 1))
            for step in range(first_step, first_step + steps):
                torch.mm(torch.ones(64, 64), torch.ones(64, 64))
                if ctx.world_size > 1:
                    torch.distributed.all_reduce(torch.ones(8))
                events.emit(_done(step + 1))


def _profiled(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "profile").glob("*")) if (folder / "profile").exists() else []


def test_traces_and_a_summary_are_written_by_all_ranks(tmp_path: Path) -> None:
    run_ranks(_train, tmp_path, ProfileConfig(first_step=2, steps=2))
    (folder,) = (tmp_path / "profile").iterdir()
    assert folder.name == "step-00000003"
    assert sorted(path.name for path in folder.iterdir()) == [
        *("rank-00000.json.gz", "rank-00001.json.gz"),
        "summary.md",
    ]
    for rank in range(2):
        with gzip.open(folder / f"rank-{rank:05}.json.gz") as file:
            names = [event.get("name") for event in json.load(file)["traceEvents"]]
        assert names.count("aten::mm") == 2
    summary = (folder / "summary.md").read_text()
    assert summary.startswith("# Steps 2 to 3\n")
    rows = re.findall(r"^\| (\d) \| (.*) \|$", summary, flags=re.MULTILINE)
    assert [rank for rank, _ in rows] == ["0", "1"]
    for _, row in rows:
        total, compute, communication, exposed, idle = map(float, row.split(" | "))
        assert min(compute, communication) > 0
        assert total == pytest.approx(compute + exposed + idle, abs=0.02)
    assert "aten::mm" in summary


@pytest.mark.parametrize(
    ("config", "first_step", "profiled"),
    [
        ({}, 0, []),
        ({"first_step": 1, "steps": 1}, 0, [1]),
        ({"first_step": 2, "steps": 1, "every": 2}, 0, [2, 4, 6]),
        ({"first_step": 2, "steps": 1, "every": 2}, 3, [4, 6, 8]),  # in a resumed job
        ({"first_step": 2, "steps": 3}, 3, []),
        ({"first_step": 5, "steps": 9, "every": 20}, 0, [6]),  # the job ends within a profile
        ({"first_step": 7, "steps": 2}, 0, []),  # the job ends before a profile
    ],
)
def test_profiles_start_at_the_configured_steps(
    tmp_path: Path, config: dict[str, int], first_step: int, profiled: list[int]
) -> None:
    _train(tmp_path, ProfileConfig.model_validate(config), first_step=first_step)
    assert _profiled(tmp_path) == [f"step-{step:08}" for step in profiled]


def _go(profiler: Profiler, *steps: int) -> None:
    for step in steps:
        torch.mm(torch.ones(64, 64), torch.ones(64, 64))
        profiler.step(_done(step))


def _summary_and_products(folder: Path) -> tuple[str, int]:
    (row,) = (folder / "profile").iterdir()
    with gzip.open(row / "rank-00000.json.gz") as file:
        names = [event.get("name") for event in json.load(file)["traceEvents"]]
    return (row / "summary.md").read_text().partition("\n")[0], names.count("aten::mm")


@pytest.mark.parametrize(
    ("back_to", "again", "expected"),
    [
        (4, (5, 6, 7), ("# Steps 5 to 7", 3)),  # rollback to the start of the profile
        (5, (6, 7), ("# Steps 6 to 7", 2)),  # rollback within the profile
        (2, (3, 4, 5, 6, 7), ("# Steps 5 to 7", 3)),  # rollback to before the profile
    ],
)
def test_a_rollback_during_a_profile_discards_steps(
    tmp_path: Path, ctx: DistributedContext, back_to: int, again: tuple[int, ...], expected: tuple[str, int]
) -> None:
    config = ProfileConfig.model_validate({"first_step": 5, "steps": 3})
    with Profiler(config, tmp_path, ctx, num_steps=9) as profiler:
        _go(profiler, 4, 5, 6)
        profiler.on_rollback(back_to)
        _go(profiler, *again)
        assert _summary_and_products(tmp_path) == expected
        _go(profiler, 8)


def test_a_profile_ended_early_is_written(tmp_path: Path, ctx: DistributedContext) -> None:
    config = ProfileConfig.model_validate({"first_step": 2, "steps": 5})
    with Profiler(config, tmp_path, ctx, num_steps=9) as profiler:
        _go(profiler, 1, 2, 3)
    assert _summary_and_products(tmp_path) == ("# Steps 2 to 3", 2)


def _fail_within_a_row(profiler: Profiler) -> None:
    with profiler:
        _go(profiler, 1, 2)
        raise KeyError


def test_an_error_stops_the_profiler_and_writes_no_profile(tmp_path: Path, ctx: DistributedContext) -> None:
    config = ProfileConfig.model_validate({"first_step": 2, "steps": 5})
    with pytest.raises(KeyError):
        _fail_within_a_row(Profiler(config, tmp_path, ctx, num_steps=9))
    assert _profiled(tmp_path) == []
    with Profiler(config, tmp_path, ctx, num_steps=2) as profiler:  # two profilers cannot run at once
        _go(profiler, 1, 2)
    assert _profiled(tmp_path) == ["step-00000002"]
