"""Simulated power loss: a recorded run is cut after any call, and unsynced data may be lost.

The model is POSIX, which guarantees less than current file systems: the bytes of a file are safe after `fsync` of the
file; its name, and any rename or removal, after `fsync` of the folder. Until then, each change may have reached the
disk or not, independent of the others.
"""

import os
import random
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias, final

from file_calls import FileCall

Tree: TypeAlias = Mapping[str, "bytes | Tree"]
Names = Literal["lost", "kept", "some"]
Content = Literal["lost", "cut", "zeros", "kept"]


@final
@dataclass(frozen=True, slots=True)
class Operation:
    """Recorded file system call.

    Attributes:
        time: Time of the call, in nanoseconds of a clock that all processes share.
        process: Id of the process that made the call.
        name: Name of the function.
        path: Path relative to the root.
        other: Second path of a rename or an exchange, relative to the root.
        descriptor: File descriptor that the call used or returned.
        offset: Offset of a write, or the new length of `ftruncate`.
        data: Written bytes.
        flags: Flags of `open`.
    """

    time: int
    process: int
    name: str
    path: str
    other: str
    descriptor: int
    offset: int
    data: bytes
    flags: int


@final
class Recording:
    """No fault; records the calls."""

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()
        self.operations: list[Operation] = []

    def __call__(self, call: FileCall) -> Any:
        offset, data, flags = 0, b"", 0
        match call.name:
            case "write":
                offset, data = os.lseek(call.arguments[0], 0, os.SEEK_CUR), bytes(call.arguments[1])
            case "pwrite":
                offset, data = call.arguments[2], bytes(call.arguments[1])
            case "ftruncate":
                offset = call.arguments[1]
            case "open":
                flags = call.arguments[1]
            case "link" | "symlink" | "writev" | "pwritev":
                raise NotImplementedError(f"the model of a disk does not know {call.name}")
        result = call.make(*call.arguments)
        descriptor = result if call.name == "open" else -1 if call.descriptor is None else call.descriptor
        if call.name in ("write", "pwrite"):
            data = data[:result]
        self.operations.append(
            Operation(
                time.monotonic_ns(),
                os.getpid(),
                call.name,
                self._relative(call.path),
                "" if call.other is None else self._relative(call.other),
                descriptor,
                offset,
                data,
                flags,
            )
        )
        return result

    def _relative(self, path: Path) -> str:
        return path.relative_to(self._root).as_posix()


@dataclass(eq=False, slots=True)
class _File:
    now: bytearray
    synced: bytes


@dataclass(eq=False, slots=True)
class _Folder:
    now: dict[str, "_File | _Folder"] = field(default_factory=dict)
    first: dict[str, "_File | _Folder"] = field(default_factory=dict)


@dataclass(slots=True)
class _Change:
    """Change of a folder's entries: a name added, removed, renamed, or exchanged."""

    kind: Literal["put", "drop", "move", "swap"]
    folder: _Folder
    name: str
    other: str = ""
    node: _File | _Folder | None = None
    synced: bool = False


@final
class Disk:
    """Simulated disk; `after_power_loss` returns a possible content after a power loss."""

    def __init__(self, tree: Tree) -> None:
        """Start with a synced tree."""
        self._root = _folder_of(tree)
        self._changes: list[_Change] = []
        self._open: dict[tuple[int, int], _File | _Folder] = {}

    def do(self, operations: Iterable[Operation]) -> None:
        """Apply a recorded call."""
        for operation in operations:
            self._do(operation)

    def now(self) -> Tree:
        """Return the content that a running process sees."""
        return _tree(self._root, lambda folder: folder.now, lambda file: bytes(file.now))

    def after_power_loss(self, names: Names, content: Content, *, seed: int = 0) -> Tree:
        """Return a possible content after power loss; `names` and `content` choose what happens to unsynced data."""
        choice = random.Random(seed)  # noqa: S311 - no secret
        entries: dict[_Folder, dict[str, _File | _Folder]] = {}
        for folder in _folders(self._root, [change.node for change in self._changes]):
            entries[folder] = dict(folder.first)
        for change in self._changes:
            if change.synced or names == "kept" or (names == "some" and choice.random() < 0.5):
                _apply(change, entries)
        return _tree(self._root, entries.__getitem__, lambda file: _content(file, content, choice))

    def _do(self, operation: Operation) -> None:
        key = (operation.process, operation.descriptor)
        match operation.name:
            case "open":
                self._open[key] = self._opened(operation)
            case "write" | "pwrite":
                file, end = self._file(key), operation.offset + len(operation.data)
                file.now.extend(bytes(max(end - len(file.now), 0)))
                file.now[operation.offset : end] = operation.data
            case "ftruncate":
                file = self._file(key)
                del file.now[operation.offset :]
                file.now.extend(bytes(operation.offset - len(file.now)))
            case "fsync" | "fdatasync":
                self._sync(self._open[key])
            case "close":
                del self._open[key]
            case _:
                self._change(operation)

    def _opened(self, operation: Operation) -> "_File | _Folder":
        if not operation.path or operation.path == ".":
            return self._root
        folder, name = self._place(operation.path)
        if operation.flags & os.O_CREAT and name not in folder.now:
            self._enter(_Change("put", folder, name, node=_File(bytearray(), b"")))
        node = folder.now[name]
        if operation.flags & os.O_TRUNC and isinstance(node, _File):
            node.now.clear()
        return node

    def _change(self, operation: Operation) -> None:
        folder, name = self._place(operation.path)
        match operation.name:
            case "mkdir":
                self._enter(_Change("put", folder, name, node=_Folder()))
            case "unlink" | "remove" | "rmdir":
                self._enter(_Change("drop", folder, name, node=folder.now[name]))
            case "rename" | "replace" | "exchange":
                to, other = self._place(operation.other)
                assert to is folder, f"{operation.path} -> {operation.other}: the model moves within a folder only"
                kind: Literal["swap", "move"] = "swap" if operation.name == "exchange" else "move"
                self._enter(_Change(kind, folder, name, other))
            case name:
                raise NotImplementedError(f"the model of a disk does not know {name}")

    def _enter(self, change: _Change) -> None:
        _apply(change, {change.folder: change.folder.now})
        self._changes.append(change)

    def _sync(self, node: "_File | _Folder") -> None:
        if isinstance(node, _File):
            node.synced = bytes(node.now)
            return
        for change in self._changes:
            change.synced |= change.folder is node

    def _file(self, key: tuple[int, int]) -> _File:
        file = self._open[key]
        assert isinstance(file, _File)
        return file

    def _place(self, path: str) -> tuple[_Folder, str]:
        *parents, name = path.split("/")
        folder = self._root
        for parent in parents:
            below = folder.now[parent]
            assert isinstance(below, _Folder), f"{path}: {parent} is not a folder"
            folder = below
        return folder, name


def read_tree(path: Path) -> Tree:
    """Return all entries below a folder."""
    return {each.name: read_tree(each) if each.is_dir() else each.read_bytes() for each in sorted(path.iterdir())}


def write_tree(path: Path, tree: Tree) -> None:
    """Create a folder from a tree."""
    path.mkdir(parents=True)
    for name, content in tree.items():
        if isinstance(content, bytes):
            (path / name).write_bytes(content)
        else:
            write_tree(path / name, content)


def merged(journals: Sequence[Sequence[Operation]]) -> list[Operation]:
    """Merge the journals of several processes in chronological order."""
    return sorted((operation for journal in journals for operation in journal), key=lambda each: each.time)


def crash_images(start: Tree, operations: Sequence[Operation], *, cuts: Iterable[int], seeds: int) -> dict[str, Tree]:
    """Return the distinct possible disk contents after a power loss, by a descriptive name.

    Args:
        start: Synced content of the disk before the operations.
        operations: Recorded calls.
        cuts: Numbers of operations after which the power fails.
        seeds: Number of random images of each cut, besides images in which all or no unsynced names are lost.
    """
    images: dict[str, Tree] = {}
    kinds: list[tuple[Names, Content]] = [("lost", "lost"), ("kept", "lost"), ("kept", "zeros"), ("kept", "cut")]
    for cut in cuts:
        disk = Disk(start)
        disk.do(operations[:cut])
        some: list[tuple[Names, Content]] = [("some", "cut")] * seeds
        for seed, (names, content) in enumerate([*kinds, *some]):
            image = disk.after_power_loss(names, content, seed=1000 * cut + seed)
            if image not in images.values():
                images[f"{cut}-{names}-{content}-{seed}"] = image
    return images


def _apply(change: _Change, entries: Mapping[_Folder, dict[str, _File | _Folder]]) -> None:
    """Apply a change, unless a change that it depends on was lost."""
    held = entries[change.folder]
    match change.kind:
        case "put":
            assert change.node is not None
            held[change.name] = change.node
        case "drop":
            node = held.get(change.name)
            is_empty = not isinstance(node, _Folder) or not entries.get(node, node.now)
            if node is change.node and is_empty:
                del held[change.name]
        case "move":
            if change.name in held:
                held[change.other] = held.pop(change.name)
        case "swap":
            if change.name in held and change.other in held:
                held[change.name], held[change.other] = held[change.other], held[change.name]


def _content(file: _File, content: Content, choice: random.Random) -> bytes:
    now = bytes(file.now)
    if now == file.synced or content == "kept":
        return now
    if content == "lost" or not now.startswith(file.synced):
        return file.synced
    safe = len(file.synced)
    if content == "zeros":
        return file.synced + bytes(len(now) - safe)
    return now[: choice.randint(safe, len(now))]


def _folder_of(tree: Tree) -> _Folder:
    entries: dict[str, _File | _Folder] = {}
    for name, content in tree.items():
        is_file = isinstance(content, bytes)
        entries[name] = _File(bytearray(content), content) if is_file else _folder_of(content)
    return _Folder(dict(entries), dict(entries))


def _folders(root: _Folder, made: Sequence["_File | _Folder | None"]) -> list[_Folder]:
    """Return every folder of the initial tree and every created folder."""
    found: dict[_Folder, None] = {}
    left: list[_File | _Folder | None] = [root, *made]
    while left:
        node = left.pop()
        if isinstance(node, _Folder) and node not in found:
            found[node] = None
            left.extend(node.first.values())
    return list(found)


def _tree(folder: _Folder, entries: Any, content: Any) -> dict[str, Any]:
    return {
        name: content(node) if isinstance(node, _File) else _tree(node, entries, content)
        for name, node in sorted(entries(folder).items())
    }
