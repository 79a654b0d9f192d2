"""Shared fixtures of the fault tests: kill a process or a save at a chosen call, and choose the calls to test."""

import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import pytest

sys.path.append(str(Path(__file__).parent / "faults"))  # helper modules for tests in several folders

from file_calls import Kill, file_calls

from d9d_state import CheckpointStore
from d9d_state.object_path import ObjectPath


@pytest.fixture
def run_killed(tmp_path: Path) -> Callable[..., bool]:
    """Runs `work` in a child process, kills it at its `at`-th file system call; returns True if it was killed.

    The kill happens before the call, and in a write after half of it. Only calls below `tmp_path` count.
    """

    def run(work: Callable[[], None], *, at: int) -> bool:
        child = os.fork()
        if child == 0:
            _work_and_exit(work, tmp_path, at)
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status):
            assert os.WTERMSIG(status) == signal.SIGKILL
            return True
        assert os.WEXITSTATUS(status) == 0, "the process failed; its traceback is on stderr"
        return False

    return run


@pytest.fixture
def save_without_manifest(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that saves to a store of objects, and is killed before it uploads the manifest."""
    upload = ObjectPath.upload

    def killed(path: ObjectPath, parts: Any) -> Any:
        if path.name == "manifest.json":
            raise KeyboardInterrupt
        return upload(path, parts)

    def save(store: CheckpointStore, step: int, state: Any) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(ObjectPath, "upload", killed)
            with pytest.raises(KeyboardInterrupt):
                store.save(step, state)

    return save


@pytest.fixture
def points(exhaustive: bool) -> Callable[..., Sequence[int]]:
    """Return a function that chooses which of the calls 1 to `count` to try: every `stride`-th, or all with `--all`.

    The last call, which commits, is always among them.
    """

    def choose(count: int, *, stride: int) -> Sequence[int]:
        return sorted(range(count, 0, -1 if exhaustive else -stride))

    return choose


def _work_and_exit(work: Callable[[], None], root: Path, at: int) -> NoReturn:
    """Run in the forked child only, so the parent never sees the patches."""
    signal.alarm(300)  # kills a child that hangs
    try:
        with file_calls(root, Kill(at)):
            work()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)
