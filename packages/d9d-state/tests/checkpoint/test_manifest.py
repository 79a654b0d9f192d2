import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from d9d_dist import Region
from d9d_state import StateError, TensorInfo
from d9d_state._digests import PartRecord
from d9d_state.checkpoint import manifest as manifest_module
from d9d_state.checkpoint.manifest import (
    Chunk,
    FileRecord,
    Manifest,
    TensorRecord,
    rank_state_name,
    tensors_name,
    with_digest,
)
from d9d_state.errors import VersionError


def _manifest() -> Manifest:
    """Build a manifest of two ranks whose file sizes match their chunks."""
    json_file = FileRecord(7, PartRecord(7, "a" * 32))
    return Manifest(
        run_id="run",
        step=3,
        metric=0.1,
        mesh={"dp_shard": 2},
        num_ranks=2,
        tensors={
            "model.a": TensorRecord(
                TensorInfo((3, 2), torch.bfloat16),
                (
                    Chunk(Region((0, 0), (2, 2)), "tensors-00000.safetensors", 50, "b" * 32),
                    Chunk(Region((2, 0), (1, 2)), "tensors-00001.safetensors", 20, "c" * 32),
                ),
            ),
            "scalar": TensorRecord(
                TensorInfo((), torch.float32), (Chunk(Region((), ()), "tensors-00000.safetensors", 58, "d" * 32),)
            ),
            "empty": TensorRecord(TensorInfo((0, 2), torch.float32), ()),
        },
        files={
            "tensors-00000.safetensors": FileRecord(62, PartRecord(50, "e" * 32)),
            "tensors-00001.safetensors": FileRecord(24, PartRecord(20, "f" * 32)),
            "rank-00000.json": json_file,
            "rank-00001.json": json_file,
            "state.json": json_file,
        },
    )


def _damaged(tmp_path: Path, change: Callable[[Any], object]) -> str:
    """Return the error for a changed manifest with a valid digest."""
    body = json.loads(_manifest().dump())
    del body["sha256"]
    change(body)
    (tmp_path / "manifest.json").write_bytes(manifest_module.with_digest(body))
    with pytest.raises(StateError) as caught:
        Manifest.read(tmp_path)
    return str(caught.value)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda body: body["tensors"]["model.a"]["chunks"].pop(), "model.a: its chunks contain 4 of 6 elements"),
        (lambda body: body["tensors"]["model.a"]["chunks"][0].update(start=49), "model.a starts at byte 49 of"),
        (lambda body: body["tensors"]["model.a"]["chunks"][1].update(offset=[1, 0]), "overlap"),
        (lambda body: body["tensors"]["scalar"].update(shape=[2]), "is empty or has other dims than the shape [2]"),
        (lambda body: body["tensors"].pop("scalar"), "has 62 bytes, but its header and tensors have 58"),
        (
            lambda body: body["tensors"]["scalar"]["chunks"][0].update(file="state.json"),
            "scalar is stored in state.json, which is not a tensor file",
        ),
        (
            lambda body: body["tensors"]["scalar"]["chunks"][0].update(file="../x"),
            "scalar is stored in ../x, which is not a tensor file",
        ),
        (lambda body: body["tensors"]["scalar"]["chunks"][0].update(digest="x"), "got 'x'; expected a digest of 32"),
        (lambda body: body["tensors"]["scalar"]["chunks"][0].update(more=1), "got the keys digest, file, more, offset"),
        (lambda body: body["files"].pop("state.json"), "it lists 4 files for 2 ranks"),
        (lambda body: body.update(num_ranks=3), "it lists 5 files for 3 ranks"),
        (
            lambda body: body["files"].update({"../x": body["files"].pop("state.json")}),
            "it lists ../x, which do not belong to a checkpoint",
        ),
        (
            lambda body: body["files"]["state.json"].update(size=8),
            "state.json has 8 bytes, but its header and tensors have 7",
        ),
        (lambda body: body.update(step=-1), "got -1; expected an integer of 0 or more"),
        (lambda body: body.update(step=True), "got True; expected an integer of 0 or more"),
        (lambda body: body.update(metric="good"), "got metric = 'good'; expected a finite float or null"),
        (lambda body: body.pop("run_id"), "got the keys digests, files, format"),
    ],
)
def test_inconsistent_manifest_is_refused(tmp_path: Path, change: Callable[[Any], object], problem: str) -> None:
    message = _damaged(tmp_path, change)
    assert "manifest.json is damaged: " in message
    assert problem in message


def test_manifest_round_trips(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_bytes(_manifest().dump())
    assert Manifest.read(tmp_path) == _manifest()


def test_bit_flips_and_truncations_are_detected(tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    data = _manifest().dump()
    changed = [data[:index] + bytes([byte ^ 1 << index % 8]) + data[index + 1 :] for index, byte in enumerate(data)]
    cut = [data[:length] for length in range(0, len(data), 7)]
    for damaged in [*changed[::3], *cut, data + b" "]:
        path.write_bytes(damaged)
        with pytest.raises(StateError, match=r"manifest\.json is damaged: "):
            Manifest.read(tmp_path)


def test_a_folder_without_a_manifest_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StateError, match=r"manifest\.json cannot be read: No such file or directory"):
        Manifest.read(tmp_path)


def test_manifest_symlink_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_bytes(_manifest().dump())
    (tmp_path / "manifest.json").symlink_to("elsewhere")
    with pytest.raises(StateError, match=r"manifest\.json is a symlink"):
        Manifest.read(tmp_path)


def test_error_names_unsupported_manifest_version(tmp_path: Path) -> None:
    for version, advice in ((4, "Install a newer d9d-state"), (2, "Load it with the d9d-state version that saved it")):
        (tmp_path / "manifest.json").write_bytes(with_digest({**_manifest().body(), "version": version}))
        message = f"manifest.json: it has format version {version}; this d9d-state reads version 3. {advice}"
        with pytest.raises(VersionError, match=message):
            Manifest.read(tmp_path)


def test_error_names_unsupported_digests(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_bytes(with_digest({**_manifest().body(), "digests": "BLAKE4"}))
    message = r"its digests are BLAKE4; this d9d-state reads XXH3-128\. Install a newer d9d-state\."
    with pytest.raises(VersionError, match=message):
        Manifest.read(tmp_path)


def test_too_large_manifest_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "manifest.json").open("wb") as file:
        file.truncate((1 << 29) + 1)
    with pytest.raises(StateError, match=r"manifest\.json is larger than 536870912 bytes"):
        Manifest.read(tmp_path)


def test_files_sort_by_rank() -> None:
    assert (tensors_name(3), rank_state_name(12)) == ("tensors-00003.safetensors", "rank-00012.json")
