"""A save that is killed at any file system call keeps all earlier checkpoints."""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from file_calls import count_calls
from tiny_checkpoint import assert_goes_on, begin, save, step_of_newest

from d9d_state import CheckpointStore


@pytest.mark.parametrize("background", [False, True], ids=["foreground", "background"])
@pytest.mark.sample("background")
def test_newest_is_the_previous_or_the_new_checkpoint(
    tmp_path: Path, background: bool, run_killed: Callable[..., bool], points: Callable[..., Sequence[int]]
) -> None:
    begin(tmp_path / "start", 1, 2)
    folder = tmp_path / "checkpoints"
    outcomes: set[int | None] = set()

    def work() -> None:
        # Both older checkpoints are deleted after the save, so that kills also happen during deletions.
        save(CheckpointStore(folder, keep_last=1), 3, background=background)

    shutil.copytree(tmp_path / "start", folder)
    count = count_calls(folder, work)
    assert count > 35
    for at in points(count, stride=5):
        shutil.rmtree(folder)
        shutil.copytree(tmp_path / "start", folder)
        assert run_killed(work, at=at), f"call {at}"
        store = CheckpointStore(folder, keep_last=1)
        outcomes.add(step_of_newest(store))
        named = sorted(folder.glob("step-????????"), reverse=True)
        assert [each.folder for each in store.complete()] == named, (
            "a torn folder has the name of a complete checkpoint"
        )
        assert_goes_on(store)
    assert outcomes == {2, 3}


@pytest.mark.slow
def test_first_save_is_complete_or_absent(
    tmp_path: Path, run_killed: Callable[..., bool], points: Callable[..., Sequence[int]]
) -> None:
    outcomes: set[int | None] = set()
    count = count_calls(tmp_path, lambda: save(CheckpointStore(tmp_path / "counted" / "checkpoints"), 1))
    for at in points(count, stride=5):
        store = CheckpointStore(tmp_path / str(at) / "checkpoints")
        assert run_killed(lambda store=store: save(store, 1), at=at), f"call {at}"
        outcomes.add(step_of_newest(store))
        assert_goes_on(store)
    assert outcomes == {None, 1}
