import errno
import os
from pathlib import Path

import pytest

from d9d_dist.durable_files import replacing_files


def _write(folder: Path, content: bytes) -> None:
    with replacing_files(folder / "b", folder / "a") as files:
        for file in files:
            file.write(content)


def _contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_all_files_are_fsynced_before_the_first_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def recorded_fsync(descriptor: int) -> None:
        name = Path(os.readlink(f"/proc/self/fd/{descriptor}")).name  # noqa: PTH115
        calls.append(f"fsync {name}")
        fsync(descriptor)

    def recorded_replace(self: Path, target: Path) -> Path:
        calls.append(f"replace {target.name}")
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(Path, "replace", recorded_replace)
    _write(tmp_path, b"new")
    assert _contents(tmp_path) == {"a": b"new", "b": b"new"}
    assert calls == ["fsync .b.partial", "fsync .a.partial", "replace b", "replace a", f"fsync {tmp_path.name}"]


def test_a_full_disk_at_the_last_file_replaces_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _write(tmp_path, b"old")
    fsync, left = os.fsync, [1]

    def full_at_the_second(descriptor: int) -> None:
        if not left:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        left.pop()
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", full_at_the_second)
    with pytest.raises(OSError, match="No space"):
        _write(tmp_path, b"new")
    assert _contents(tmp_path) == {"a": b"old", "b": b"old"}


def test_an_error_of_the_body_replaces_none(tmp_path: Path) -> None:
    _write(tmp_path, b"old")
    with pytest.raises(TypeError, match="bytes-like"):
        _write(tmp_path, 1)  # ty: ignore[invalid-argument-type]
    assert _contents(tmp_path) == {"a": b"old", "b": b"old"}
