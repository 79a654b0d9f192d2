import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from d9d_dist import UserError
from d9d_state._member import open_member, read_member


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _socket(path: Path) -> None:
    # Socket paths are limited in length, so use a path relative to the folder.
    before = Path.cwd()
    os.chdir(path.parent)
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(before)


def _link_to(target: str) -> Callable[[Path], None]:
    return lambda path: path.symlink_to(target)


@pytest.mark.parametrize("name", ["", ".", "..", "../secret", "/etc/hostname", "a/b", "a/../b", "a\\b", "a\0b", "b/"])
def test_only_plain_file_names_are_opened(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match="expected the plain name of a file in that folder"):
        open_member(tmp_path, name)


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (_link_to("../outside"), "a symlink"),
        (_link_to("regular"), "a symlink"),
        (_link_to("nowhere"), "a symlink"),
        (_link_to("/dev/zero"), "a symlink"),
        (_link_to("../../blobs/regular"), "a symlink"),
        (Path.mkdir, "a folder"),
        (_fifo, "a FIFO"),
        (_socket, "a socket"),
    ],
)
def test_only_regular_files_are_opened(tmp_path: Path, make: Callable[[Path], None], kind: str) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (tmp_path / "outside").touch()
    (folder / "regular").touch()
    make(folder / "made")
    with pytest.raises(UserError, match=f"made is {kind}; expected a regular file"):
        open_member(folder, "made")


def test_device_files_are_refused() -> None:
    with pytest.raises(UserError, match="/dev/zero is a special file; expected a regular file"):
        open_member(Path("/dev"), "zero")


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="absent cannot be read: No such file or directory"):
        open_member(tmp_path, "absent")
    with pytest.raises(UserError, match="b cannot be read: No such file or directory"):
        open_member(tmp_path / "a", "b")


def test_open_descriptor_survives_replacement(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"first")
    with os.fdopen(open_member(tmp_path, "file"), "rb") as file:
        (tmp_path / "file").unlink()
        (tmp_path / "file").symlink_to("/etc/hostname")
        assert file.read() == b"first"


def test_limit_of_bytes_is_kept(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")
    assert [read_member(tmp_path, "file", limit) for limit in (None, 3, 9)] == [b"content", b"con", b"content"]


def test_no_descriptor_is_left_open(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    _fifo(tmp_path / "fifo")
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - pathlib cannot list it
    for name in ("deep", "fifo", "absent"):
        with pytest.raises(UserError):
            open_member(tmp_path, name)
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


@pytest.mark.parametrize("absolute", [False, True])
def test_symlinks_of_the_hugging_face_cache_are_followed(tmp_path: Path, absolute: bool) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "revision"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    (blobs / "0123").write_bytes(b"content")
    (blobs / "link").symlink_to("../secret")
    (tmp_path / "secret").touch()
    to_blobs = str(blobs) if absolute else "../../blobs"
    for name, target in {"good": "0123", "evil": "../secret", "chained": "link", "dangling": "absent"}.items():
        (snapshot / name).symlink_to(f"{to_blobs}/{target}")
    assert read_member(snapshot, "good") == b"content"
    for name, message in {"evil": "is a symlink", "chained": "is a symlink", "dangling": "cannot be read"}.items():
        with pytest.raises(UserError, match=message):
            open_member(snapshot, name)
