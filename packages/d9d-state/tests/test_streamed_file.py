import os
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from d9d_state import TensorInfo
from d9d_state._streamed_file import StreamedFile

_TENSORS = {
    "transposed": torch.randn(5, 7).t(),
    "conjugate": torch.randn(4, dtype=torch.complex64).conj(),
    "half": torch.randn(3).bfloat16(),
    "scalar": torch.tensor(7),
    "empty": torch.empty(0, 2),
    "flags": torch.rand(5) > 0.5,
}


@pytest.mark.parametrize("at_once", [1, 1 << 20])
def test_tensors_are_written_in_any_order_with_short_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    original = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, data, offset: original(file, data[:at_once], offset))
    infos = {name: TensorInfo.of(tensor) for name, tensor in _TENSORS.items()}
    file = StreamedFile(tmp_path / "a.safetensors", infos, metadata={"format": "pt"})
    for name in random.sample(sorted(_TENSORS), len(_TENSORS)):
        file.write(name, _TENSORS[name])
    file.close()
    loaded = load_file(tmp_path / "a.safetensors")
    assert loaded.keys() == _TENSORS.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in _TENSORS.items())


def test_incomplete_file_cannot_be_closed(tmp_path: Path) -> None:
    file = StreamedFile(tmp_path / "a.safetensors", {"a": TensorInfo((1,), torch.float32)}, metadata={})
    with pytest.raises(AssertionError, match="not written: a"):
        file.close()
    file.abandon()


def test_existing_file_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_text("precious")
    with pytest.raises(FileExistsError):
        StreamedFile(tmp_path / "a.safetensors", {}, metadata={})
    assert (tmp_path / "a.safetensors").read_text() == "precious"
