"""What the tests of faults share: ending a process at a chosen call, and the choice of the calls that are tried."""

import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import pytest

sys.path.append(str(Path(__file__).parent / "faults"))  # the modules there serve the tests of several folders

from file_calls import Kill, file_calls


@pytest.fixture
def run_killed(tmp_path: Path) -> Callable[..., bool]:
    """Runs `work` in a process of its own, kills it at its `at`-th call to the file system, says whether it was killed.

    Each call is killed before it is done, and a write after half of it. Calls below `tmp_path` count.
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
    """In the child only: nothing that is patched here is ever seen by the parent."""
    try:
        with file_calls(root, Kill(at)):
            work()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)
