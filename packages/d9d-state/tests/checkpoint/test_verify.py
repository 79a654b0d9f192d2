import os
import random
from pathlib import Path
from threading import Barrier, get_ident

import pytest
import torch

from d9d_state import CheckpointStore
from d9d_state._digests import PartRecord
from d9d_state.checkpoint._verify import FilePart, damage, parts_of, share_of


def test_verification_is_balanced_over_ranks() -> None:
    draws = random.Random(0)  # noqa: S311
    for num_ranks in (1, 2, 3, 7):
        parts = [FilePart("f", 0, 0, PartRecord(draws.choice([0, 1, 50, 200]), ""), str(index)) for index in range(200)]
        shares = [share_of(parts, rank=rank, num_ranks=num_ranks) for rank in range(num_ranks)]
        assert [part for share in shares for part in share] == parts
        sizes = [sum(part.record.size for part in share) for share in shares]
        assert max(sizes) - min(sizes) <= 2 * 200 + 200


def test_parts_cover_all_bytes_of_all_files(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.save(1, {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(()), "c": torch.empty(0)}, state=[1])
    (info,) = store.complete()
    parts = parts_of(info.manifest)
    files = {path.name: path.stat().st_size for path in info.folder.iterdir() if path.name != "manifest.json"}
    ends = dict.fromkeys(files, 0)
    for part in parts:
        assert part.start == ends[part.file]
        ends[part.file] += part.record.size
    assert ends == files


def test_damage_is_detected_with_one_or_several_threads(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.save(1, {name: torch.rand(3_000_000 if name == "b" else 10) for name in "abc"})
    (info,) = store.complete()
    path = info.folder / "tensors-00000.safetensors"
    (large,) = info.manifest.tensors["b"].chunks
    with path.open("r+b") as file:
        file.seek(large.start + 9_000_000)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 1]))
    (info.folder / "state.json").unlink()
    expected = [
        f"{info.folder}/state.json cannot be read: No such file or directory. "
        "The folder is incomplete; download or copy it again.",
        f"{path}: b [3000000] float32 does not have the recorded XXH3-128 digest",
    ]
    for threads in (1, 3):
        assert damage(info.folder, parts_of(info.manifest), threads=threads) == expected


def test_each_thread_reads_one_contiguous_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, both, reads, preadv = bytes(range(32)), Barrier(2, timeout=60), dict[int, list[int]](), os.preadv

    def read(descriptor: int, buffers: list[memoryview], position: int) -> int:
        both.wait()  # both threads read at the same time, whatever the machine does
        reads.setdefault(get_ident(), []).append(position)
        return preadv(descriptor, buffers, position)

    (tmp_path / "file").write_bytes(data)
    parts = [FilePart("file", 32, start, PartRecord.of(data[start : start + 8]), "") for start in range(0, 32, 8)]
    monkeypatch.setattr(os, "preadv", read)
    assert damage(tmp_path, parts, threads=2) == []
    assert sorted(reads.values()) == [[0, 8], [16, 24]]


def test_a_file_of_another_size_is_one_problem(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(31))
    parts = [FilePart("file", 32, start, PartRecord.of(bytes(8)), "") for start in range(0, 32, 8)]
    for threads in (1, 3):
        assert damage(tmp_path, parts, threads=threads) == [f"{tmp_path / 'file'} has 31 bytes; expected 32"]
