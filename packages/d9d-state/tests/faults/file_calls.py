"""Interception of the file system calls that open or change files, to kill the process or fail a call.

A fault is chosen by the number of the call, so that a test can try every call. Only calls below one folder are
intercepted, so that files of the test runner are not affected.
"""

import errno
import os
import signal
import threading
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, final
from unittest import mock

from d9d_state import _files

_ON_PATHS = ("open", "mkdir", "rmdir", "unlink", "remove", "rename", "replace", "link", "symlink")
_ON_DESCRIPTORS = ("write", "pwrite", "writev", "pwritev", "fsync", "fdatasync", "ftruncate", "close")
_ALLOCATING = ("mkdir", "write", "pwrite", "writev", "pwritev", "ftruncate", "link", "symlink")


@final
@dataclass(frozen=True, slots=True)
class FileCall:
    """File system call before it is made.

    Attributes:
        name: Name of the function in `os`, or `exchange`.
        path: Path of the file or folder, also for calls with a descriptor.
        other: Second path of a rename or an exchange.
        descriptor: File descriptor, if the call has one; `None` for `open`.
        arguments: Arguments of the caller.
        make: Makes the call.
    """

    name: str
    path: Path
    other: Path | None
    descriptor: int | None
    arguments: tuple[Any, ...]
    make: Callable[..., Any]

    @property
    def allocates(self) -> bool:
        """True if the call fails on a full disk."""
        creates = self.name == "open" and bool(self.arguments[1] & os.O_CREAT)
        return creates or self.name in _ALLOCATING


class Fault(Protocol):
    """Handler of each intercepted call."""

    def __call__(self, call: FileCall) -> Any:
        """Handle the call; return the result for the caller."""
        ...


@final
class Counting:
    """No fault; counts the calls."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __call__(self, call: FileCall) -> Any:
        self.names.append(call.name)
        return call.make(*call.arguments)


@final
@dataclass(slots=True)
class Kill:
    """SIGKILL before the `at`-th call, in a write after half of it. Use it in a child process."""

    at: int
    seen: int = 0

    def __call__(self, call: FileCall) -> Any:
        self.seen += 1
        if self.seen == self.at:
            _make_half(call)
            os.kill(os.getpid(), signal.SIGKILL)
        return call.make(*call.arguments)


@final
@dataclass(slots=True)
class Fail:
    """An error at the `at`-th call, once.

    As on Linux, a file is closed even if `close` fails.
    """

    at: int
    code: int = errno.EIO
    seen: int = 0
    hit: FileCall | None = None

    def __call__(self, call: FileCall) -> Any:
        self.seen += 1
        if self.seen != self.at:
            return call.make(*call.arguments)
        self.hit = call
        if call.name == "close":
            call.make(*call.arguments)
        raise _error(self.code, call)


@final
@dataclass(slots=True)
class FullDisk:
    """Full disk from the `at`-th call on: the first write is short, later calls that need space fail."""

    at: int
    seen: int = 0
    hit: FileCall | None = None

    def __call__(self, call: FileCall) -> Any:
        self.seen += 1
        if self.seen < self.at or not call.allocates:
            return call.make(*call.arguments)
        first, self.hit = self.hit is None, self.hit or call
        if first and call.name == "write" and len(call.arguments[1]) > 1:
            return _make_half(call)
        raise _error(errno.ENOSPC, call)


@contextmanager
def file_calls(root: Path, fault: Fault) -> Generator[None]:
    """Pass each call below `root`, from any thread, to `fault` while the context is active."""
    watch = _Watch(root.absolute(), fault)
    originals = {name: getattr(os, name) for name in (*_ON_PATHS, *_ON_DESCRIPTORS)}
    with ExitStack() as patches:
        for name, original in originals.items():
            patches.enter_context(mock.patch.object(os, name, watch.wrap(name, original)))
        patches.enter_context(mock.patch.object(_files, "exchange", watch.wrap_exchange(_files.exchange)))
        yield


def count_calls(root: Path, work: Callable[[], None]) -> int:
    """Return the number of calls that `work` makes below `root`."""
    counting = Counting()
    with file_calls(root, counting):
        work()
    return len(counting.names)


@dataclass(slots=True)
class _Watch:
    root: Path
    fault: Fault
    descriptors: dict[int, Path] = field(default_factory=dict)
    lock: Any = field(default_factory=threading.RLock)
    inside: threading.local = field(default_factory=threading.local)

    def wrap(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            described = self._describe(name, args, kwargs)
            if described is None or "exchange" in vars(self.inside):
                return original(*args, **kwargs)
            path, other, descriptor = described
            with self.lock:
                result = self.fault(
                    FileCall(name, path, other, descriptor, args, lambda *again: original(*again, **kwargs))
                )
                if name == "open":
                    self.descriptors[result] = path
                return result

        return wrapper

    def wrap_exchange(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def make(one: Path, other: Path) -> None:
            vars(self.inside)["exchange"] = True  # its nested calls are not counted
            try:
                original(one, other)
            finally:
                del vars(self.inside)["exchange"]

        def wrapper(one: Path, other: Path) -> None:
            with self.lock:
                self.fault(FileCall("exchange", one.absolute(), other.absolute(), None, (one, other), make))

        return wrapper

    def _describe(self, name: str, args: Any, kwargs: Any) -> tuple[Path, Path | None, int | None] | None:
        """Return paths and descriptor of a call; `None` if it is outside the root."""
        if name in _ON_DESCRIPTORS:
            path = self.descriptors.pop(args[0], None) if name == "close" else self.descriptors.get(args[0])
            return None if path is None else (path, None, args[0])
        path = self._absolute(args[0], kwargs.get("dir_fd", kwargs.get("src_dir_fd")))
        other = None
        if name in ("rename", "replace", "link"):
            other = self._absolute(args[1], kwargs.get("dst_dir_fd"))
        ours = any(each == self.root or self.root in each.parents for each in (path, other) if each is not None)
        return (path, other, None) if ours else None

    def _absolute(self, path: Any, folder: int | None) -> Path:
        if isinstance(path, int):
            return self.descriptors.get(path, Path("/"))
        base = Path() if folder is None else self.descriptors.get(folder, Path("/proc"))
        return Path(os.path.abspath(base / os.fsdecode(path)))  # noqa: PTH100 - does not resolve symlinks


def _make_half(call: FileCall) -> Any:
    """Write the first half of a write's bytes; do nothing for other calls."""
    if call.name in ("write", "pwrite"):
        descriptor, data, *rest = call.arguments
        view = memoryview(data).cast("B")
        return call.make(descriptor, view[: len(view) // 2], *rest)
    return None


def _error(code: int, call: FileCall) -> OSError:
    return OSError(code, os.strerror(code), str(call.path))
