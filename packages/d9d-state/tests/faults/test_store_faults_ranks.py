"""Faults on one of two ranks: jobs resume from one step on all ranks, and every rank raises errors."""

import importlib
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from file_calls import Kill
from forked_ranks import run_forked
from power_loss import Disk, crash_images, merged, read_tree, write_tree
from rank_jobs import save_counted, save_recorded, save_with_errors
from tiny_checkpoint import assert_goes_on, begin, save_on_ranks, step_of_newest

from d9d_dist import DistributedContext
from d9d_dist.testing import run_ranks
from d9d_state import CheckpointStore


@pytest.fixture(scope="module")
def _compiler() -> None:
    """Import modules that every forked rank would otherwise import at its first `DTensor`, which takes seconds."""
    importlib.import_module("torch._dynamo")


@pytest.fixture
def start(tmp_path: Path) -> Path:
    """Create a folder with two checkpoints."""
    begin(tmp_path / "start", 1, 2)
    return tmp_path / "start"


def _counts(start: Path, folder: Path, *, background: bool) -> list[int]:
    """Return the number of calls that each rank makes in a save."""
    shutil.copytree(start, folder)
    counts = run_ranks(save_counted, str(folder), background)
    assert min(counts) > 5
    return counts


def _save_step_3(folder: Path, *, background: bool) -> Callable[[DistributedContext], None]:
    return lambda ctx: save_on_ranks(CheckpointStore(folder, keep_last=1), 3, ctx, background=background)


_MODES = pytest.mark.parametrize("background", [False, True], ids=["foreground", "background"])


@pytest.mark.slow
@pytest.mark.usefixtures("_compiler")
@_MODES
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.sample("0-foreground", "1-background")
def test_a_rank_killed_at_any_call_leaves_a_loadable_checkpoint(
    tmp_path: Path, start: Path, rank: int, background: bool, points: Callable[..., Sequence[int]]
) -> None:
    folder = tmp_path / "checkpoints"
    count = _counts(start, folder, background=background)[rank]
    for at in points(count, stride=12 if rank == 0 else 5):
        shutil.rmtree(folder)
        shutil.copytree(start, folder)
        codes = run_forked(_save_step_3(folder, background=background), folder, world_size=2, faults={rank: Kill(at)})
        assert codes[rank] == -9
        store = CheckpointStore(folder)
        assert step_of_newest(store) in (2, 3), f"call {at}"
        assert_goes_on(store)


@_MODES
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.sample("1-foreground")
def test_error_on_a_rank_at_any_call_raises_on_all(
    tmp_path: Path, start: Path, rank: int, background: bool, points: Callable[..., Sequence[int]]
) -> None:
    folder = tmp_path / "checkpoints"
    count = _counts(start, folder, background=background)[rank]
    tried = [*points(count, stride=7)]
    results = run_ranks(save_with_errors, str(start), str(folder), rank, tried, background, timeout=600)
    for wrong, told in results:
        assert not wrong
        assert told > 0
    assert step_of_newest(CheckpointStore(folder)) == 4


@_MODES
def test_power_loss_on_all_ranks_leaves_a_loadable_checkpoint(
    tmp_path: Path, start: Path, background: bool, exhaustive: bool, points: Callable[..., Sequence[int]]
) -> None:
    root = tmp_path / "root"
    shutil.copytree(start, root / "checkpoints")
    before = read_tree(root)
    operations = merged(run_ranks(save_recorded, str(root), background))
    disk = Disk(before)
    disk.do(operations)
    assert disk.now() == read_tree(root), "the recording misses something"
    outcomes: set[int | None] = set()
    cuts = [0, *points(len(operations), stride=8), len(operations)]
    for name, image in crash_images(before, operations, cuts=cuts, seeds=30 if exhaustive else 2).items():
        write_tree(tmp_path / name, image)
        store = CheckpointStore(tmp_path / name / "checkpoints")
        step = step_of_newest(store)
        assert step in (2, 3), name
        outcomes.add(step)
        assert_goes_on(store)
    assert outcomes == {2, 3}
