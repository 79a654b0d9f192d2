"""A power loss may lose unsynced data, but never a checkpoint with its final name."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from file_calls import file_calls
from power_loss import Disk, Recording, crash_images, read_tree, write_tree
from tiny_checkpoint import assert_goes_on, begin, save, step_of_newest

from d9d_state import CheckpointStore


@pytest.mark.parametrize("background", [False, True], ids=["foreground", "background"])
@pytest.mark.parametrize("older", [(), (1, 2)], ids=["fresh", "retention"])
@pytest.mark.slow("retention-foreground")
def test_newest_is_the_previous_or_the_new_checkpoint(
    tmp_path: Path, older: tuple[int, ...], background: bool, exhaustive: bool, points: Callable[..., Sequence[int]]
) -> None:
    root = tmp_path / "root"
    root.mkdir()
    begin(root / "checkpoints", *older)
    start, recording = read_tree(root), Recording(root)
    with file_calls(root, recording):
        save(CheckpointStore(root / "checkpoints", keep_last=1), 3, background=background)
    operations = recording.operations
    disk = Disk(start)
    disk.do(operations)
    assert disk.now() == read_tree(root), "the recording misses something"
    outcomes: set[int | None] = set()
    cuts = [0, *points(len(operations), stride=3), len(operations)]
    for name, image in crash_images(start, operations, cuts=cuts, seeds=30 if exhaustive else 2).items():
        write_tree(tmp_path / name, image)
        store = CheckpointStore(tmp_path / name / "checkpoints")
        step = step_of_newest(store)
        assert step in (older[-1] if older else None, 3), name
        outcomes.add(step)
        assert_goes_on(store)
    assert outcomes == {older[-1] if older else None, 3}


def test_completed_save_survives_power_loss(tmp_path: Path) -> None:
    recording = Recording(tmp_path)
    with file_calls(tmp_path, recording):
        save(CheckpointStore(tmp_path / "runs" / "checkpoints"), 3)
    for seed in range(20):
        disk = Disk({})
        disk.do(recording.operations)
        write_tree(tmp_path / str(seed), disk.after_power_loss("some", "lost", seed=seed))
        assert step_of_newest(CheckpointStore(tmp_path / str(seed) / "runs" / "checkpoints")) == 3
