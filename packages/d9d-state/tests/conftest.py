"""Shared fixtures of the fault tests: kill a process at a chosen call, and choose the calls to test."""

import os
import random
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import pytest

sys.path.append(str(Path(__file__).parent / "faults"))  # helper modules for tests in several folders

from file_calls import Kill, file_calls

_EXHAUSTIVE = os.environ.get("D9D_EXHAUSTIVE", "") == "1"


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


@pytest.fixture(scope="session")
def exhaustive() -> bool:
    """True with `D9D_EXHAUSTIVE=1`: test every failure point, which takes minutes. Otherwise test a random sample."""
    return _EXHAUSTIVE


@pytest.fixture
def points(exhaustive: bool) -> Callable[..., Sequence[int]]:
    """Chooses the calls from 1 to `count` to test: all, or every `stride`-th from a random start."""

    def choose(count: int, *, stride: int) -> Sequence[int]:
        if exhaustive:
            return range(1, count + 1)
        return range(random.randint(1, min(stride, count)), count + 1, stride)  # noqa: S311 - no secret

    return choose


def _work_and_exit(work: Callable[[], None], root: Path, at: int) -> NoReturn:
    """Run in the forked child only, so the parent never sees the patches."""
    try:
        with file_calls(root, Kill(at)):
            work()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)
