import json
from pathlib import Path

import pytest
import torch

from d9d_state import StateError, TensorInfo
from d9d_state._files import FileRecord
from d9d_state.checkpoint.manifest import Chunk, Manifest, TensorRecord, rank_state_name, tensors_name


def _manifest() -> Manifest:
    return Manifest(
        run_id="run",
        step=3,
        mesh={"dp_shard": 2},
        num_ranks=2,
        tensors={
            "model.a": TensorRecord(
                TensorInfo((3, 2), torch.bfloat16),
                (Chunk((0, 0), (2, 2), "x", "a@0,0"), Chunk((2, 0), (1, 2), "y", "a@2,0")),
            ),
            "scalar": TensorRecord(TensorInfo((), torch.float32), (Chunk((), (), "x", "scalar@"),)),
        },
        files={"x": FileRecord(7, "ab"), "y": FileRecord(0, "cd")},
    )


def test_comes_back_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_bytes(_manifest().dump())
    assert Manifest.read(tmp_path) == _manifest()


def test_any_changed_bit_and_any_cut_is_found(tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    data = _manifest().dump()
    changed = [data[:index] + bytes([byte ^ 1 << index % 8]) + data[index + 1 :] for index, byte in enumerate(data)]
    cut = [data[:length] for length in range(0, len(data), 7)]
    for damaged in [*changed, *cut, data + b" "]:
        path.write_bytes(damaged)
        with pytest.raises(StateError, match=r"manifest\.json is damaged: "):
            Manifest.read(tmp_path)


def test_a_folder_without_a_manifest(tmp_path: Path) -> None:
    with pytest.raises(StateError, match=r"manifest\.json cannot be read: No such file or directory"):
        Manifest.read(tmp_path)


def test_a_manifest_that_is_a_link(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_bytes(_manifest().dump())
    (tmp_path / "manifest.json").symlink_to("elsewhere")
    with pytest.raises(StateError, match=r"manifest\.json is a symlink"):
        Manifest.read(tmp_path)


def test_a_manifest_of_a_later_version_says_so(tmp_path: Path) -> None:
    body = json.loads(_manifest().dump())
    (tmp_path / "manifest.json").write_text(json.dumps({**body, "version": 2}))
    with pytest.raises(StateError, match="it has format version 2; this d9d-state reads up to 1, so install a newer"):
        Manifest.read(tmp_path)


def test_a_manifest_that_is_too_large(tmp_path: Path) -> None:
    with (tmp_path / "manifest.json").open("wb") as file:
        file.truncate((1 << 28) + 1)
    with pytest.raises(StateError, match=r"manifest\.json is larger than 268435456 bytes"):
        Manifest.read(tmp_path)


def test_files_sort_by_rank() -> None:
    assert (tensors_name(3), rank_state_name(12)) == ("tensors-00003.safetensors", "rank-00012.json")
