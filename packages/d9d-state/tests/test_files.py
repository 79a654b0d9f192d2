import hashlib
import os
import threading
from pathlib import Path

import pytest

from d9d_dist import UserError
from d9d_state import _files
from d9d_state._digests import PartRecord


def test_write_file_records_what_is_on_disk(tmp_path: Path) -> None:
    path = tmp_path / "file"
    large = os.urandom((9 << 20) + 5)
    parts = [b"one", memoryview(large), b"", memoryview(b"two"), large[: 1 << 20]]
    records = _files.write_file(path, parts)
    assert path.read_bytes() == b"".join(parts)
    assert records == tuple(PartRecord(len(part), hashlib.sha256(part).hexdigest()) for part in parts)


def test_a_write_that_fails_leaves_no_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_descriptor: int, _block: memoryview) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        _files.write_file(tmp_path / "file", [bytes(1 << 20)])
    assert not [thread for thread in threading.enumerate() if thread.name == "d9d-digests"]


def test_write_file_overwrites_nothing(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with pytest.raises(FileExistsError):
        _files.write_file(path, [b"new"])
    assert path.read_bytes() == b"old"


def test_exchange_swaps_folders(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    _files.exchange(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "a" / "b").exists()
    assert (tmp_path / "b" / "a").exists()


def test_exchange_works_where_the_system_has_no_call_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_files, "_renameat2", lambda *_arguments: -1)
    test_exchange_swaps_folders(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_remove_folder_does_not_follow_symlinks(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").touch()
    inside = tmp_path / "inside"
    (inside / "deep").mkdir(parents=True)
    (inside / "deep" / "link").symlink_to(outside)
    _files.remove_folder(inside)
    assert not inside.exists()
    assert (outside / "precious").exists()


@pytest.mark.parametrize("name", ["", ".", "..", "../secret", "/etc/hostname", "a/b", "a\\b", "a\0b"])
def test_member_takes_plain_names_only(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match="expected the plain name of a file in that folder"):
        _files.member(tmp_path, name)


def test_member_takes_regular_files_only(tmp_path: Path) -> None:
    (tmp_path / "outside").touch()
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "link").symlink_to("../outside")
    (folder / "dangling").symlink_to("nowhere")
    (folder / "deep").mkdir()
    (folder / "regular").touch()
    os.mkfifo(folder / "fifo")
    for name, kind in (("link", "a symlink"), ("dangling", "a symlink"), ("deep", "a folder"), ("fifo", "a FIFO")):
        with pytest.raises(UserError, match=f"{name} is {kind}; expected a regular file"):
            _files.member(folder, name)
    with pytest.raises(UserError, match="absent cannot be read: No such file or directory"):
        _files.member(folder, "absent")
    assert _files.member(folder, "regular") == folder / "regular"


def test_member_takes_the_links_of_the_hugging_face_cache(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "revision"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    (blobs / "0123").touch()
    (tmp_path / "secret").touch()
    (snapshot / "model.safetensors").symlink_to("../../blobs/0123")
    (snapshot / "evil.safetensors").symlink_to("../../secret")
    assert _files.member(snapshot, "model.safetensors").name == "model.safetensors"
    with pytest.raises(UserError, match=r"evil\.safetensors is a symlink"):
        _files.member(snapshot, "evil.safetensors")
