"""Ends a process at a chosen point of its work on files, so that tests can try every point."""

import os
import signal
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

import pytest

from d9d_state import _files

_CALLS = ("mkdir", "open", "write", "fsync", "close", "rename", "unlink", "rmdir")


@pytest.fixture
def run_killed() -> Callable[..., bool]:
    """Runs `work` in a process of its own and kills it at its `at`-th file-system call; says whether it was killed.

    Each call is killed before it is done, and a write after half of it.
    """

    def run(work: Callable[[], None], *, at: int) -> bool:
        child = os.fork()
        if child == 0:
            _work_and_exit(work, at)
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status):
            assert os.WTERMSIG(status) == signal.SIGKILL
            return True
        assert os.WEXITSTATUS(status) == 0, "the process failed; its traceback is on stderr"
        return False

    return run


def _work_and_exit(work: Callable[[], None], at: int) -> NoReturn:
    """In the child only: nothing that is patched here is ever seen by the parent."""
    try:
        left = at

        def counted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
            def wrapper(*args: Any, **kwargs: Any) -> Any:
                nonlocal left
                left -= 1
                if left == 0:
                    if name == "write":
                        call(args[0], memoryview(args[1])[: len(args[1]) // 2])
                    os.kill(os.getpid(), signal.SIGKILL)
                return call(*args, **kwargs)

            return wrapper

        for name in _CALLS:
            setattr(os, name, counted(name, getattr(os, name)))
        setattr(_files, "exchange", counted("exchange", _files.exchange))  # noqa: B010 - a function is assigned anew
        work()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)
