"""Shared fixtures of the fault tests: kill a process at a chosen call, and choose the calls to test."""

import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import pytest

sys.path.append(str(Path(__file__).parent / "faults"))  # helper modules for tests in several folders

from file_calls import Kill, file_calls


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
