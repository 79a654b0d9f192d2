import os
import signal
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from unittest import mock

import pytest

from d9d_loop.data.partial_folder import PartialFolder


def _write_until_killed(target: Path, connection: Connection) -> None:
    (PartialFolder(target).path / "tokens").write_bytes(b"half of it")
    connection.send(None)
    signal.pause()


def test_leftovers_of_killed_writers_are_removed_and_running_ones_kept(tmp_path: Path) -> None:
    context = get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=_write_until_killed, args=(tmp_path / "one", theirs), daemon=True)
    process.start()
    theirs.close()  # the call below ends if the process fails
    ours.recv()
    (left,) = tmp_path.iterdir()
    beside = PartialFolder(tmp_path / "another")
    assert set(tmp_path.iterdir()) == {left, beside.path}
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    last = PartialFolder(tmp_path / "one")
    assert set(tmp_path.iterdir()) == {beside.path, last.path}
    for partial in (beside, last):
        partial.publish()
        partial.close()
    assert {path.name for path in tmp_path.iterdir()} == {"one", "another"}


def test_folders_of_other_machines_are_kept(tmp_path: Path) -> None:
    with mock.patch("socket.gethostname", return_value="elsewhere"):
        other = PartialFolder(tmp_path / "one")
    os.close(other._descriptor)  # a lock of another machine is not visible here
    PartialFolder(tmp_path / "one").close()
    assert list(tmp_path.iterdir()) == [other.path]


def test_without_locks_nothing_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse = mock.Mock(side_effect=OSError("no locks available"))
    monkeypatch.setattr("fcntl.flock", refuse)
    first, second = PartialFolder(tmp_path / "one"), PartialFolder(tmp_path / "one")
    assert first.path.exists()
    for partial in (first, second):
        partial.close()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_removed_before_its_lock_is_created_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([True])

    def take_away(_descriptor: int, _operation: int) -> None:
        if next(times, False):
            (taken,) = tmp_path.iterdir()
            taken.rmdir()

    monkeypatch.setattr("fcntl.flock", take_away)
    partial = PartialFolder(tmp_path / "one")
    assert list(tmp_path.iterdir()) == [partial.path]
    partial.close()
