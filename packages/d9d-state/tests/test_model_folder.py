import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from d9d_dist import UserError
from d9d_state import ModelFolder, StateError, TensorInfo, model_folder, read_model_state, save_model_state
from d9d_state.safetensors_header import read_header


def _write_index(folder: Path, weight_map: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_opens_a_model_of_one_file(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    folder = ModelFolder.open(tmp_path)
    assert folder.tensors == {"a": TensorInfo((2,), torch.float32)}
    assert folder.files == {"a": tmp_path / "model.safetensors"}


def test_a_model_of_several_files_is_opened_by_its_index(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "one.safetensors")
    save_file({"b": torch.ones(3), "unlisted": torch.ones(1)}, tmp_path / "two.safetensors")
    _write_index(tmp_path, {"a": "one.safetensors", "b": "two.safetensors"})
    folder = ModelFolder.open(str(tmp_path))
    assert folder.tensors == {"a": TensorInfo((2,), torch.float32), "b": TensorInfo((3,), torch.float32)}
    assert folder.files == {"a": tmp_path / "one.safetensors", "b": tmp_path / "two.safetensors"}


def test_a_folder_with_two_models_is_an_error(tmp_path: Path) -> None:
    """As after two saves of transformers with other sizes of shards."""
    for name, value in (("model", 1.0), ("one", 2.0), ("two", 2.0)):
        save_file({"a" if name != "two" else "b": torch.full((2,), value)}, tmp_path / f"{name}.safetensors")
    _write_index(tmp_path, {"a": "one.safetensors", "b": "two.safetensors"})
    with pytest.raises(
        UserError, match=r"has model\.safetensors and model\.safetensors\.index\.json of other files; delete"
    ):
        ModelFolder.open(tmp_path)
    (tmp_path / "two.safetensors").unlink()  # the index is of an earlier save
    assert ModelFolder.open(tmp_path).files == {"a": tmp_path / "model.safetensors"}
    _write_index(tmp_path, {"a": "model.safetensors"})
    assert ModelFolder.open(tmp_path).files == {"a": tmp_path / "model.safetensors"}


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"contains no model; expected model\.safetensors or model\.safetensors\.index\.json"
    ):
        ModelFolder.open(tmp_path / "absent")


@pytest.mark.parametrize(
    "name",
    ["../x.safetensors", "/etc/hostname", "a/../x.safetensors", "", ".", "..", "sub/x.safetensors", "a\\b", "a\0b"],
)
def test_an_index_names_files_of_its_folder_only(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "folder"
    (folder / "sub").mkdir(parents=True)
    for path in (tmp_path, folder / "sub"):
        save_file({"a": torch.ones(1)}, path / "x.safetensors")
    _write_index(folder, {"a": name})
    with pytest.raises(UserError, match="expected the plain name of a file in that folder"):
        ModelFolder.open(folder)


def test_an_index_names_regular_files_only(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "outside.safetensors")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "link.safetensors").symlink_to("../outside.safetensors")
    os.mkfifo(folder / "fifo.safetensors")
    for name, kind in (("link", "a symlink"), ("fifo", "a FIFO")):
        _write_index(folder, {"a": f"{name}.safetensors"})
        with pytest.raises(UserError, match=f"is {kind}; expected a regular file"):
            ModelFolder.open(folder)


def test_an_index_that_is_a_link_is_refused(tmp_path: Path) -> None:
    _write_index(tmp_path, {})
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "model.safetensors.index.json").symlink_to("../model.safetensors.index.json")
    with pytest.raises(UserError, match="is a symlink"):
        ModelFolder.open(folder)


def test_index_with_missing_tensor_is_refused(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "x.safetensors")
    _write_index(tmp_path, {"a": "x.safetensors", "b": "x.safetensors"})
    with pytest.raises(UserError, match=r"lists tensors that are not in their files: b in x\.safetensors"):
        ModelFolder.open(tmp_path)
    _write_index(tmp_path, {"a": "y.safetensors"})
    with pytest.raises(UserError, match=r"y\.safetensors cannot be read: No such file"):
        ModelFolder.open(tmp_path)


@pytest.mark.parametrize("text", ["[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}'])
def test_index_without_valid_weight_map_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(UserError, match="has no valid weight_map"):
        ModelFolder.open(tmp_path)


def test_index_that_is_not_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "x", "a": "y"}}')
    with pytest.raises(UserError, match="is not valid JSON: JSON repeats the key 'a'"):
        ModelFolder.open(tmp_path)


def test_too_large_or_nested_index_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors.index.json"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(UserError, match="it has more than 33554432 bytes or 10000 objects"):
        ModelFolder.open(tmp_path)
    path.write_bytes(b'{"weight_map":[' + b"[]," * 20_000 + b"[]]}")
    with pytest.raises(UserError, match="it has more than 33554432 bytes or 10000 objects"):
        ModelFolder.open(tmp_path)


def test_error_lists_only_some_missing_tensors(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "x.safetensors")
    _write_index(tmp_path, {f"t{number}": "x.safetensors" for number in range(1000)})
    with pytest.raises(UserError, match=r"t7 in x\.safetensors and 992 more\.$"):
        ModelFolder.open(tmp_path)


def test_symlinks_of_the_hugging_face_cache_are_followed(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "revision"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    save_file({"a": torch.ones(2)}, blobs / "0123")
    (snapshot / "model.safetensors").symlink_to("../../blobs/0123")
    assert ModelFolder.open(snapshot).tensors == {"a": TensorInfo((2,), torch.float32)}


def _save(folder: Path, value: float, *, num_files: int) -> None:
    tensors = {name: torch.full((4,), value) for name in "ab"}
    save_model_state(nn.ParameterDict(tensors), folder, max_shard_bytes=32 // num_files, progress=False)


@pytest.mark.parametrize("num_files", [1, 2])
def test_a_folder_that_is_replaced_while_its_headers_are_read_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_files: int
) -> None:
    _save(tmp_path / "model", 1.0, num_files=2)
    waiting = [0.0, 2.0]

    def replaced(path: Any) -> Any:
        header = read_header(path)
        if waiting:
            _save(tmp_path / "model", waiting.pop(), num_files=num_files)
        return header

    monkeypatch.setattr(model_folder, "read_header", replaced)
    assert {name: tensor.tolist() for name, tensor in read_model_state(tmp_path / "model")} == {
        "a": [0.0] * 4,
        "b": [0.0] * 4,
    }


@pytest.mark.parametrize("num_files", [1, 2])
def test_a_folder_that_is_replaced_while_its_weights_are_read_is_an_error(tmp_path: Path, num_files: int) -> None:
    _save(tmp_path / "model", 1.0, num_files=num_files)
    stream = read_model_state(tmp_path / "model")
    if num_files == 2:
        assert next(stream)[1].tolist() == [1.0] * 4
    _save(tmp_path / "model", 2.0, num_files=num_files)
    with pytest.raises(
        StateError, match=r"\.safetensors has changed since its header was read, .*Load the weights again"
    ):
        next(stream)
