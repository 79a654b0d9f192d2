"""A save that is killed at any of its calls to the file system never costs more than the save itself."""

import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from d9d_state import CheckpointStore


def _tensors(step: int) -> dict[str, Tensor]:
    return {"model.a": torch.full((3, 4), float(step)), "optimizer.a.step": torch.tensor(float(step))}


def _save(store: CheckpointStore, step: int) -> None:
    store.save(step, _tensors(step), state={"step": step}, rank_state=[step])


def _assert_whole(store: CheckpointStore) -> int:
    """Load the newest checkpoint, see that all of it is of one step, and give that step."""
    info = store.newest()
    assert info is not None, "nothing is left to resume from"
    named = sorted(store.folder.glob("step-????????"), reverse=True)
    assert [each.folder for each in store.complete()] == named, "a torn folder has the name of a complete checkpoint"
    info.verify()
    loaded = {name: torch.zeros_like(tensor) for name, tensor in _tensors(0).items()}
    store.load(info, loaded)
    assert info.state == {"step": info.step}
    assert info.rank_states == [[info.step]]
    assert all(torch.equal(loaded[name], tensor) for name, tensor in _tensors(info.step).items())
    return info.step


def test_the_newest_is_the_one_before_or_the_new_one(tmp_path: Path, run_killed: Callable[..., bool]) -> None:
    start = tmp_path / "start"
    for step in (1, 2):
        _save(CheckpointStore(start), step)
    folder = tmp_path / "checkpoints"
    outcomes: set[int] = set()
    at, killed = 0, True
    while killed:
        at += 1
        shutil.copytree(start, folder)
        # Both older checkpoints are deleted after the save, so that the kills fall into deletions too.
        store = CheckpointStore(folder, keep_last=1)
        killed = run_killed(lambda store=store: _save(store, 3), at=at)
        found = _assert_whole(store)
        outcomes.add(found)
        store.discard_partials()
        assert not list(folder.glob("*.partial"))
        if found == 2:
            _save(store, 3)
        assert _assert_whole(store) == 3
        shutil.rmtree(folder)
    assert outcomes == {2, 3}
    assert at > 35


def test_a_first_save_is_there_or_not(tmp_path: Path, run_killed: Callable[..., bool]) -> None:
    at, killed = 0, True
    outcomes: set[bool] = set()
    while killed:
        at += 1
        store = CheckpointStore(tmp_path / str(at) / "checkpoints", keep_last=1)
        killed = run_killed(lambda store=store: _save(store, 1), at=at)
        exists = store.newest() is not None
        outcomes.add(exists)
        if not exists:
            store.discard_partials()
            _save(store, 1)
        assert _assert_whole(store) == 1
    assert outcomes == {True, False}
