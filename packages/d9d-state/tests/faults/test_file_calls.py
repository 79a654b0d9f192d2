"""Tests of the fault injection itself: it reaches all calls and would expose a careless writer."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from file_calls import Counting, Fail, FullDisk, file_calls
from power_loss import Disk, Names, Recording, merged, read_tree, write_tree

from d9d_state import _files


def _write(path: Path, data: bytes, *, sync: bool) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.write(descriptor, data)
    if sync:
        os.fsync(descriptor)
    os.close(descriptor)


def _busy(folder: Path) -> None:
    """Make every kind of call."""
    (folder / "deep").mkdir()
    _write(folder / "deep" / "a", b"one", sync=True)
    _write(folder / "old", b"two", sync=False)
    (folder / "deep" / "a").rename(folder / "deep" / "b")
    _files.fsync(folder / "deep")
    (folder / "other").mkdir()
    _files.exchange(folder / "deep", folder / "other")
    descriptor = os.open(folder / "old", os.O_RDWR)
    os.pwrite(descriptor, b"WO", 1)
    os.ftruncate(descriptor, 2)
    os.close(descriptor)
    _files.remove_folder(folder / "other")


def test_disk_model_matches_the_file_system(tmp_path: Path) -> None:
    start = {"old": b"before", "deeper": {"x": b"1"}}
    write_tree(tmp_path / "root", start)
    recording = Recording(tmp_path / "root")
    with file_calls(tmp_path / "root", recording):
        _busy(tmp_path / "root")
    _write(tmp_path / "root" / "later", b"unseen", sync=False)
    (tmp_path / "root" / "later").unlink()
    disk = Disk(start)
    disk.do(merged([recording.operations]))
    assert disk.now() == read_tree(tmp_path / "root") == {"old": b"tW", "deep": {}, "deeper": {"x": b"1"}}
    assert disk.after_power_loss("kept", "kept") == disk.now()
    assert disk.after_power_loss("lost", "lost") == start


def test_calls_outside_the_root_are_not_affected(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    counting = Counting()
    with file_calls(tmp_path / "root", counting):
        _write(tmp_path / "elsewhere", b"data", sync=True)
        _write(tmp_path / "root" / "here", b"data", sync=True)
        os.rename(tmp_path / "elsewhere", tmp_path / "root" / "moved")  # noqa: PTH104
    assert counting.names == ["open", "write", "fsync", "close", "rename"]


def _replace(folder: Path, *, sync_file: bool, sync_folder: bool) -> None:
    _write(folder / "new", b"new content", sync=sync_file)
    (folder / "new").rename(folder / "file")
    if sync_folder:
        _files.fsync(folder)


@pytest.mark.parametrize(
    ("sync_file", "sync_folder", "names", "expected"),
    [
        (True, True, "lost", {b"new content"}),
        (True, False, "lost", {b"old"}),
        (True, False, "some", {b"old", b"new content"}),
        (False, True, "lost", {b""}),
        (False, False, "some", {b"old", b""}),
    ],
)
def test_unsynced_data_is_lost(
    tmp_path: Path, sync_file: bool, sync_folder: bool, names: Names, expected: set[bytes]
) -> None:
    write_tree(tmp_path / "root", {"file": b"old"})
    recording = Recording(tmp_path / "root")
    with file_calls(tmp_path / "root", recording):
        _replace(tmp_path / "root", sync_file=sync_file, sync_folder=sync_folder)
    disk = Disk({"file": b"old"})
    disk.do(recording.operations)
    assert {disk.after_power_loss(names, "lost", seed=seed)["file"] for seed in range(30)} == expected
    if not sync_file:
        contents = [disk.after_power_loss("kept", kind, seed=1)["file"] for kind in ("lost", "cut", "zeros", "kept")]
        assert contents[0] == b""
        assert b"new content".startswith(bytes(contents[1]))  # ty: ignore[invalid-argument-type]
        assert contents[2:] == [bytes(11), b"new content"]


def test_error_fault_fires_once(tmp_path: Path) -> None:
    fail = Fail(3)
    with file_calls(tmp_path, fail):
        with pytest.raises(OSError, match="Input/output error") as caught:
            _write(tmp_path / "file", b"data", sync=True)
        assert caught.value.errno == errno.EIO
        _write(tmp_path / "file", b"data", sync=True)
    assert fail.hit is not None
    assert fail.hit.name == "fsync"


def test_full_disk_allows_only_deletions(tmp_path: Path) -> None:
    with file_calls(tmp_path, FullDisk(2)):
        _write(tmp_path / "file", b"data", sync=True)
        assert (tmp_path / "file").read_bytes() == b"da"
        for work in ((tmp_path / "deep").mkdir, lambda: _write(tmp_path / "other", b"", sync=False)):
            with pytest.raises(OSError, match="No space left on device"):
                work()
        (tmp_path / "file").unlink()
    assert not (tmp_path / "file").exists()


def test_kill_during_a_write_leaves_half_of_it(tmp_path: Path, run_killed: Callable[..., bool]) -> None:
    path = tmp_path / "file"
    assert run_killed(lambda: _write(path, b"data", sync=True), at=1)
    assert not path.exists()
    assert run_killed(lambda: _write(path, b"data", sync=True), at=2)
    assert path.read_bytes() == b"da"
    assert not run_killed(lambda: _write(path, b"data", sync=True), at=5)
    assert path.read_bytes() == b"data"
