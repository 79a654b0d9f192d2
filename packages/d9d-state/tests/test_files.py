import os
from pathlib import Path

import pytest
import xxhash

from d9d_state import _files
from d9d_state._digests import PartRecord


def test_write_file_records_what_is_on_disk(tmp_path: Path) -> None:
    path = tmp_path / "file"
    large = os.urandom((9 << 20) + 5)
    parts = [b"one", memoryview(large), b"", memoryview(b"two"), large[: 1 << 20]]
    records = _files.write_file(path, parts)
    assert path.read_bytes() == b"".join(parts)
    assert records == tuple(PartRecord(len(part), xxhash.xxh3_128_hexdigest(part)) for part in parts)


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


def test_exchange_works_without_renameat2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_remove_folder_deletes_a_symlink_in_its_place(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "precious").touch()
    (tmp_path / "link").symlink_to(tmp_path / "outside")
    _files.remove_folder(tmp_path / "link")
    assert not (tmp_path / "link").is_symlink()
    assert (tmp_path / "outside" / "precious").exists()
